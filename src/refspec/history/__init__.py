"""SGLang's git history, walked: how its folder of speculative decoding came to be what it is.

| module                           | what it answers                                                                   |
|----------------------------------|-----------------------------------------------------------------------------------|
| `catalogue`                      | facts known without a clone: commits, releases, instructive commits, claims       |
| `clone`, `sources`               | one clone, asked in bulk and never written to; which one, if any                  |
| `cloning`, `inspection`          | a clone made, where alone the network is asked; what a clone lacks                |
| `commits`, `log`                 | the commits of a folder; chosen by day, pull request, file and title, and counted |
| `revisions`, `patches`, `show`   | which commit a word means; what changed between two; all that is known of one     |
| `paths`                          | which file a word means; how a path is told                                       |
| `reland`                         | a first try, its revert, and what the second try has that the first had not       |
| `directory`                      | the folder at releases and revisions: which files came, went, were renamed        |
| `story`                          | the instructive commits: what to see in each, and where                           |
| `raw_log`                        | commits with the contents that they replaced, by their hashes                     |
| `outline`, `symbols`             | where a file of Python defines what; the life of a definition                     |
| `functions`                      | every change of one function, with its diff                                       |
| `file_life`, `likeness`          | the life of a file through renames and splits; how alike two texts are            |
| `definitions`, `moved`           | sources as syntax trees; was a refactoring a pure move?                           |
| `counterparts`, `compare`        | where SGLang has what ours is modelled on; the two beside one another             |
| `claims`                         | statements about this code, checked                                               |
| `bisect_demo`, `demo_repository` | a lesson in bisection, and the small repository that it makes                     |

What a clone lacks is said, never guessed. Nothing of SGLang's own text is in this package: hashes, dates, numbers,
titles and names of files only.
"""
