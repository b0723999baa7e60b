"""SGLang's git history, walked: how its folder of speculative decoding came to be what it is.

| module      | what it answers                                                                                  |
|-------------|--------------------------------------------------------------------------------------------------|
| `catalogue` | facts that are known without a clone: commits, releases, instructive commits, claims             |
| `clone`     | one clone of SGLang, asked in bulk through git, never written to, never reaching for the network |
| `sources`   | which clone, if any                                                                              |
| `cloning`   | a clone, made or brought up to date: the one module that asks the network, or writes             |
| `inspection`| what a clone is, and what it can and cannot answer                                               |
| `commits`   | the commits of a folder, off a clone or off the catalogue                                        |
| `log`       | commits chosen by day, pull request, file and title, and counted                                 |
| `revisions` | which commit a word means: a revision, a release, a pull request                                 |
| `patches`   | what changed between two trees, file by file                                                     |
| `show`      | one commit, and the releases that held it first                                                  |
| `reland`    | a first try, its revert, and what the reland has that the first try had not                      |
| `directory` | the folder at releases and revisions: its files, and which came, went, were renamed              |
| `story`     | the instructive commits: what to see in each, and the part of its diff that shows it             |
| `bisect_demo` | a lesson: which commit changed the number of draft forwards, by git bisect                     |
| `demo_repository` | the small repository of that lesson                                                        |
| `symbols`   | the life of a function, class, method or name                                                    |
| `function_lines` | every change of one function, with its diff                                                 |
| `file_life` | the life of a file through renames and splits                                                    |
| `definitions`, `likeness` | where a file of Python defines what; how alike two texts are                       |
| module                    | what it answers                                                                                  |
|---------------------------|--------------------------------------------------------------------------------------------------|
| `catalogue`               | facts that are known without a clone: commits, releases, instructive commits, claims             |
| `clone`                   | one clone of SGLang, asked in bulk through git, never written to, never reaching for the network |
| `sources`                 | which clone, if any                                                                              |
| `commits`                 | the commits of a folder, off a clone or off the catalogue                                        |
| `symbols`                 | the life of a function, class, method or name                                                    |
| `function_lines`          | every change of one function, with its diff                                                      |
| `file_life`               | the life of a file through renames and splits                                                    |
| `definitions` | where a file of Python defines what; how alike two texts are                                     |
| `commits`   | the commits of a folder, off a clone or off the catalogue                                        |
| `symbols`   | the life of a function, class, method or name                                                    |
| `functions` | every change of one function, with its diff                                                      |
| `file_life` | the life of a file through renames and splits                                                    |
| `outline`   | where a file of Python defines what                                                              |
| `likeness`  | how alike two texts are                                                                          |
| module         | what it answers                                                                                  |
|----------------|--------------------------------------------------------------------------------------------------|
| `catalogue`    | facts that are known without a clone: commits, releases, instructive commits, claims             |
| `clone`        | one clone of SGLang, asked in bulk through git, never written to, never reaching for the network |
| `sources`      | which clone, if any                                                                              |
| `commits`      | the commits of a folder, off a clone or off the catalogue                                        |
| `naming`       | what people call a commit: a pull request, a version, a revision                                 |
| `definitions`  | Python sources as definitions with their syntax trees                                            |
| `moved`        | was a refactoring a pure move                                                                    |
| `counterparts` | where SGLang has what ours is modelled on, and from when until when                              |
| `compare`      | a function of ours beside SGLang's                                                               |

What a clone lacks is said, never guessed. Nothing of SGLang's own text is in this package: hashes, dates, numbers,
titles and names of files only.
"""
