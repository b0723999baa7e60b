"""No draft model: what the target is about to say, somebody may have said before.

Code, quotations and edited texts repeat themselves. Whatever stands in the prompts and outputs of an engine goes into a
trie (`spec/ngram_trie.py`); a round looks up how the text so far has gone on, and the target checks these guesses as it
would any other tree. A round costs one target forward and none besides; where nothing is found it is a step of plain
decoding, over a tree that is all root.

What differs from a draft model's tree:

- It comes with a mask, not with a pool of candidates. `links_from_mask` finds the links.
- It has no levels: a single long match may fill it, so its longest path has N nodes, the root among them.
- It may have fewer than N nodes. The rows that are left repeat the root, and hang nowhere.
- Its accepted rows lie scattered over it, so with pages they are moved to the front, as they are for k > 1. (SGLang
  refuses n-gram trees that branch with a page_size above 1 for all attention backends but one.)

All requests of an engine share one trie, as in SGLang: a request finds what others have said. So how many guesses are
accepted, and how many rounds a text takes, depends on what the engine has served before, and what else it serves at the
time. The text must not, and a greedy one does not. A sampled one would, if its guesses were judged by coins of their
own: a seed would bring another text in other company. So the target's choice after each node is drawn first, with the
coin that plain decoding throws for its position, and only then looked for among the node's children. They catch it with
the probability that they have together, which is how often a coin for each node would accept one; the text has the
target's law because it is, token for token, what plain decoding says.

A request that is retracted and reads its text again inserts it again, since it may have been evicted meanwhile. Ranks
that share a batch have a trie each. (SGLang refuses n-gram with attention spread over ranks.)

Source: SGLang: python/sglang/srt/speculative/ngram_worker.py:NGRAMWorker @0.5.23. There each round inserts the newest
max_trie_depth tokens again, and prompts are not inserted: of one, no more than its end is ever found; and guesses are
judged by coins. transformers: src/transformers/generation/utils.py:_assisted_decoding @v4.48.0 draws first, too, where
drafts come without a law, as those of its prompt lookup do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import Candidates, CommitOutput, ForwardOutput, VerifyInput, VerifyOutput
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.spec.masked_tree import tree_from_mask
from refspec.spec.ngram_trie import GuessTree, NgramTrie
from refspec.workers.base import Stats
from refspec.workers.eagle_v1 import SpecWorker


class NgramWorker(SpecWorker):
    """The target, and a trie of what it was told and has said."""

    def __init__(self, target: ModelRunner, allocator: SlotAllocator, stats: Stats, config: SpecConfig) -> None:
        super().__init__(target, allocator, stats, config)
        self.trie = NgramTrie(config.ngram_max_trie_depth, config.ngram_capacity)

    reads_ahead = 0

    def read_prompt(self, batch: RunningBatch, out: ForwardOutput, slots: Tensor) -> RunningBatch:
        """Who has read all of its prompt inserts it, with the first token of the output."""
        for request in batch.requests:
            if not request.unread_len:
                self.trie.insert(request.all_ids)
        return batch.keep(batch.going_on())

    def draft(self, batch: RunningBatch) -> None:
        """There is nothing to run."""

    def make_tree(self, batch: RunningBatch, candidates: Candidates | None) -> VerifyInput:
        """Look up each request's last tokens; the trees, filled up to N nodes."""
        config, device = self.config, batch.rows.device
        n, depth = config.num_draft_tokens, config.ngram_max_trie_depth
        trees = [
            self.trie.guess(newest(request, depth), n, config.ngram_max_bfs_breadth, config.ngram_match_type)
            for request in batch.requests
        ]
        for tree in trees:
            self.stats.candidates += len(tree) - 1
            self.stats.drafted_levels += max(tree.depths)
        tokens = [tree.tokens + tree.tokens[:1] * (n - len(tree)) for tree in trees]
        masks = [mask_of(tree, n) for tree in trees]
        return tree_from_mask(
            batch,
            torch.tensor(tokens, dtype=torch.int64, device=device).view(len(trees), n),
            torch.tensor(masks, dtype=torch.bool, device=device).view(len(trees), n, n),
        )

    def extend(self, batch: RunningBatch, verified: VerifyOutput, done: CommitOutput) -> RunningBatch:
        """Insert what the round has brought; the newest tokens are the next roots."""
        for request, accept_len in zip(batch.requests, done.accept_lens, strict=True):
            text = newest(request, self.config.ngram_max_trie_depth - 1 + accept_len)
            self.trie.insert(text, start=len(text) - accept_len)
        return batch.after_round(verified, done)[0]


def newest(request: Request, count: int) -> list[int]:
    """The last tokens of prompt and output, so many if there are. Costs no more than these."""
    return (request.prompt_ids[-count:] + request.output_ids[-count:])[-count:]


def mask_of(tree: GuessTree, size: int) -> list[list[bool]]:
    """Row c true at node c and at its ancestors; rows beyond the tree's at themselves alone. size x size."""
    rows: list[list[bool]] = []
    for node in range(size):
        parent = tree.parents[node] if node < len(tree) else -1
        row = [False] * size if parent < 0 else rows[parent].copy()
        row[node] = True
        rows.append(row)
    return rows
