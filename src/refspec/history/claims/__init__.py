"""What a clone says of the statements that circulate about SGLang's speculative decoding.

| module          | what it does                                                                                     |
|-----------------|--------------------------------------------------------------------------------------------------|
| `evidence`      | reads commits, files, definitions and diffs off a clone, in bulk and each once                   |
| `checking`      | what a check is, what it finds, and the verdict that follows                                     |
| `walk`          | follows a function through its source: which calls it makes, in which order                      |
| `eagle_arrival` | the checks of the study notes on EAGLE: commits, their titles and days                           |
| `eagle_worker`  | the same: what the code of a round does                                                          |
| `eagle_later`   | the same: what the folder held, and what came later                                              |
| `pull_requests` | the checks of notes on three pull requests, and of what was read in the code                     |
| `verdicts`      | runs checks, together, and compares what they find with what the catalogue lists                 |

A check decides from what it reads. None holds its verdict: on another history it comes out otherwise.
"""
