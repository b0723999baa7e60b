"""What a clone says of the statements that circulate about SGLang's speculative decoding.

| module             | what it does                                                                                 |
|--------------------|----------------------------------------------------------------------------------------------|
| `evidence`         | reads commits, files, definitions and diffs off a clone, in bulk and each once               |
| `checking`         | what a check is, what it finds, and the verdict that follows                                 |
| `walk`             | follows a function through its source: which calls it makes, in which order                  |
| `eagle_arrival`    | the checks of the study notes on EAGLE: the commits that brought it                          |
| `eagle_follow_ups` | the same: the commits that followed, one by one                                              |
| `eagle_worker`     | the same: which models a round runs, how often, and on what                                  |
| `eagle_slots`      | the same: which slots of the cache a round takes and gives back                              |
| `eagle_later`      | the same: what the folder held, and what came into it later                                  |
| `eagle_commits`    | what they share: the days of commits, and what came with which                               |
| `eagle_round`      | what they share: a round of the worker's, followed                                           |
| `pull_requests`    | the checks of notes on three pull requests, and of what was read in the code                 |
| `verdicts`         | runs checks, together, and compares what they find with what the catalogue lists             |

A check decides from what it reads. None holds its verdict: on another history it comes out otherwise.
"""
