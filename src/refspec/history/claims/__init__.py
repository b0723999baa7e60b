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
| `eagle_commits`    | what they share: the four commits, and what came with which                                  |
| `eagle_round`      | what they share: a round of the worker's, followed                                           |
| `chain_rows`       | the checks of the notes on #32887: rows of parents that a chain of drafts prepares once      |
| `tree_reland`      | of those on #26997: trees for spec v2, reverted and landed again                             |
| `frozen_kv_mtp`    | of those on #27607: the frozen-KV MTP worker goes to spec v2                                 |
| `code_reading`     | of what was read in the code                                                                 |
| `wording`          | what all of them share: facts about a commit, figures and lists in words                     |
| `syntax`           | what they share: calls, keywords and values in the syntax tree of a definition               |
| `verdicts`         | runs checks, together, and compares what they find with what the catalogue lists             |

A check decides from what it reads. None holds its verdict: on another history it comes out otherwise.
"""
