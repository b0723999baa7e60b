"""The tree of guesses that come with a mask, and how one of fewer nodes is filled up."""

from __future__ import annotations

import pytest
import torch

from refspec import SamplingParams
from refspec.kernels import links_from_mask, tree_sampling_target_only, verify_tree_greedy
from refspec.requests.request import Request, RunningBatch
from refspec.spec.masked_tree import tree_from_mask
from refspec.spec.ngram_trie import GuessTree
from refspec.workers.ngram import mask_of


def tree_of(*paths: list[int], root: int = 9) -> GuessTree:
    tree = GuessTree([root])
    for path in paths:
        node = 0
        for token in path:
            node = tree.child(node, token)
    return tree


def batch_of(*seq_lens: int) -> RunningBatch:
    requests = [Request(r, [1] * n, SamplingParams(), frozenset(), 99, kv_len=n) for r, n in enumerate(seq_lens)]
    return RunningBatch.of(requests, torch.zeros(1, 99, dtype=torch.int64))


def test_by_hand() -> None:
    """4 and then 5 or 6, or 7; two nodes are left over. And a tree that is all root."""
    trees = [tree_of([4, 5], [4, 6], [7]), tree_of()]
    tokens = torch.tensor([[*tree.tokens, *[9] * (7 - len(tree))] for tree in trees])
    made = tree_from_mask(batch_of(20, 3), tokens, torch.tensor([mask_of(tree, 7) for tree in trees]))
    assert made.draft_token.tolist() == [9, 4, 5, 6, 7, 9, 9] + [9] * 7
    assert made.positions.tolist() == [20, 21, 22, 22, 21, 20, 20] + [3] * 7
    assert made.retrieve_next_token.tolist() == [[1, 2, -1, -1, -1, -1, -1], [-1] * 7]
    assert made.retrieve_next_sibling.tolist() == [[-1, 4, 3, -1, -1, -1, -1], [-1] * 7]
    assert made.retrieve_index.tolist() == [list(range(7)), list(range(7, 14))]
    rows = ["1000000", "1100000", "1110000", "1101000", "1000100", "0000010", "0000001"]
    own = [f"{1 << column:07b}"[::-1] for column in range(7)]
    told = ["".join(str(int(seen)) for seen in row) for row in made.tree_mask.view(-1, 7)]
    assert told == rows + own
    assert made.top_scores_index.shape == (2, 0)
    assert {made.draft_token.dtype, made.positions.dtype, made.top_scores_index.dtype} == {torch.int64}


def test_of_no_requests() -> None:
    made = tree_from_mask(batch_of(), torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4, 4, dtype=torch.bool))
    assert made.draft_token.shape == made.positions.shape == made.tree_mask.shape == (0,)
    assert made.retrieve_index.shape == made.retrieve_next_token.shape == (0, 4)


@pytest.mark.parametrize("filled_with", [0, 4, 9])
def test_no_walk_reaches_what_fills_it_up_whatever_it_holds(filled_with: int) -> None:
    tree = tree_of([4])
    tokens = torch.tensor([[*tree.tokens, *[filled_with] * 6]])
    made = tree_from_mask(batch_of(2), tokens, torch.tensor([mask_of(tree, 8)]))
    links = made.retrieve_index, made.retrieve_next_token, made.retrieve_next_sibling
    wanted = torch.tensor([[0, *[filled_with] * 7]])  # at the root 0, which nobody guesses
    assert verify_tree_greedy(tokens, *links, wanted, 7)[2].tolist() == [0]


def test_children_of_the_root_with_token_0_bend_the_law_of_who_throws_coins() -> None:
    """The trap: so SGLang fills trees up. Of 1000 evenly spaced coins, 200 should bring token 0."""
    coins = 1000
    law = torch.tensor([0.2, 0.5, 0.3]).expand(coins, 4, 3).contiguous()
    thrown = ((torch.arange(coins) + 0.5) / coins)[:, None].expand(-1, 4).contiguous()
    tokens = torch.zeros(coins, 4, dtype=torch.int64)
    share = {}
    for name, tree in (("zeros", tree_of()), ("ours", tree_of([0]))):
        mask = torch.tensor(mask_of(tree, 4))
        if name == "zeros":
            mask[:, 0] = True
        links = links_from_mask(mask.expand(coins, 4, 4).contiguous())
        predict, _, _ = tree_sampling_target_only(tokens, *links, law, thrown, thrown[:, 0].flip(0).contiguous(), 3)
        share[name] = predict.view(coins, 4)[:, 0].eq(0).sum().item()
    assert share == {"zeros": 600, "ours": 200}
