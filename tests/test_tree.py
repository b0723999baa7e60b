"""Of all candidates the best are kept, and with every node its parent."""

from __future__ import annotations

import random

import pytest
import torch
from builders import candidates_of
from hypothesis import given
from hypothesis import strategies as st
from reference import Node, best_first, grow, tree_of_kept

from refspec import SamplingParams, SpecConfig
from refspec.contracts import Candidates
from refspec.requests.request import Request, RunningBatch
from refspec.spec.tree import make_tree, organize_draft_results

Grown = tuple[list[Node], list[list[int]]]


def levels_of(grown: list[Grown], topk: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The pools as the draft loop hands them over, level by level."""
    scores, tokens, parents = [], [], []
    for level in range(len(grown[0][1])):
        cut = slice(candidates_of(topk, level), candidates_of(topk, level + 1))
        shape = (len(grown), 1 if level == 0 else topk, topk)
        scores.append(torch.tensor([[float(node.score) for node in pool[cut]] for pool, _ in grown]).view(shape))
        tokens.append(torch.tensor([[node.token for node in pool[cut]] for pool, _ in grown]))
        parents.append(torch.tensor([([-1] if level == 0 else []) + beams[level] for _, beams in grown]))
    return scores, tokens, parents


def grown_of(rng: random.Random, topk: int, steps: int, values: list[float]) -> Grown:
    def below() -> list[tuple[float, int]]:
        return sorted(((rng.choice(values), rng.randrange(100)) for _ in range(topk)), key=lambda child: -child[0])

    return grow([[below() for _ in range(topk if level else 1)] for level in range(steps)], topk)


def batch_of(seq_lens: list[int], bonus: list[int]) -> RunningBatch:
    requests = [Request(r, [1] * n, SamplingParams(), frozenset(), 99, kv_len=n) for r, n in enumerate(seq_lens)]
    batch = RunningBatch.of(requests, torch.zeros(1, 99, dtype=torch.int64))
    batch.bonus_tokens = torch.tensor(bonus)
    return batch


@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    topk=st.integers(1, 5),
    steps=st.integers(1, 5),
    size=st.floats(0, 1),
    values=st.sampled_from([[0.0, 0.25, 0.5, 1.0], [1e-20, 1e-30, 0.0], [0.9, 0.8, 0.31, 0.3, 0.01]]),
)
def test_kept_are_the_best_and_their_tree_is_the_right_one(
    seed: int, batch: int, topk: int, steps: int, size: float, values: list[float]
) -> None:
    rng = random.Random(seed)
    grown = [grown_of(rng, topk, steps, values) for _ in range(batch)]
    pool_size = candidates_of(topk, steps)
    n = 2 + round(size * (pool_size - 1))
    parent_list, kept, tokens = organize_draft_results(*levels_of(grown, topk), n)
    assert parent_list.shape == (batch, topk * (steps - 1) + 1 if steps > 1 else 0)
    for r, (pool, _) in enumerate(grown):
        expected = sorted(best_first(pool, range(pool_size))[: n - 1])
        assert kept[r].tolist() == expected
        assert tokens[r].tolist() == [pool[i].token for i in expected]
        assert all(pool[i].parent in [-1, *expected] for i in expected)  # no child without its parent
    assert kept.dtype == tokens.dtype == parent_list.dtype == torch.int64

    seq_lens = [3 + r for r in range(batch)]
    running = batch_of(seq_lens, bonus=[500 + r for r in range(batch)])
    config = SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=n)
    slots = torch.zeros(batch, topk, steps, dtype=torch.int64)
    made = make_tree(running, Candidates(*levels_of(grown, topk), slots), config)
    trees = [tree_of_kept(pool, kept[r].tolist(), seq_lens[r]) for r, (pool, _) in enumerate(grown)]
    assert made.draft_token.view(batch, n).tolist() == [[500 + r, *tokens[r].tolist()] for r in range(batch)]
    assert made.positions.view(batch, n).tolist() == [tree.positions for tree in trees]
    assert made.tree_mask.view(batch, n, n).tolist() == [tree.mask for tree in trees]
    assert made.retrieve_next_token.tolist() == [tree.first_child for tree in trees]
    assert made.retrieve_next_sibling.tolist() == [tree.next_sibling for tree in trees]
    assert torch.equal(made.top_scores_index, kept)


def test_TREE_01_chain_of_three_steps_by_the_general_path() -> None:
    """k = 1, S = 3: parents -1 0 1; picks 0 1 2 for four nodes, 0 1 for three."""
    chain = grow([[[(0.9, 5)]], [[(0.8, 6)]], [[(0.7, 7)]]], topk=1)
    for n, picks in ((4, [0, 1, 2]), (3, [0, 1])):
        parent_list, kept, tokens = organize_draft_results(*levels_of([chain], 1), n)
        assert parent_list.tolist() == [[-1, 0, 1]]
        assert kept.tolist() == [picks]
        assert tokens.tolist() == [[5, 6, 7][: n - 1]]


def test_TREE_04_one_step_has_no_parent_list() -> None:
    one_level = grow([[[(0.6, 8), (0.4, 9)]]], topk=2)
    parent_list, kept, tokens = organize_draft_results(*levels_of([one_level], 2), 3)
    assert (parent_list.shape, parent_list.dtype) == ((1, 0), torch.int64)
    assert kept.tolist() == [[0, 1]]
    assert tokens.tolist() == [[8, 9]]


def test_TREE_05_which_candidates_are_kept() -> None:
    """A .6, B .4; under A: C .9, D .1; under B: E .8, F .2. Of six candidates A, B and C = .54 are the best three."""
    grown = grow([[[(0.6, 1), (0.4, 2)]], [[(0.9, 3), (0.1, 4)], [(0.8, 5), (0.2, 6)]]], topk=2)
    parent_list, kept, tokens = organize_draft_results(*levels_of([grown], 2), 4)
    assert parent_list.tolist() == [[-1, 0, 1]]
    assert kept.tolist() == [[0, 1, 2]]
    assert tokens.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("n", range(2, 22))
def test_TREE_06_scores_that_run_to_zero_keep_no_orphan(n: int) -> None:
    """Products of 1e-25 are 0 in float32 from the second level on: all tie, and parents still come first."""
    rng = random.Random(n)
    grown = grown_of(rng, 3, 3, [1e-25, 1e-26, 1e-27])
    pool, _ = grown
    _, kept, _ = organize_draft_results(*levels_of([grown], 3), n)
    chosen = set(kept[0].tolist())
    assert len(chosen) == n - 1
    assert all(pool[i].parent in chosen | {-1} for i in chosen)


def test_TREE_06_two_paths_below_what_float32_holds() -> None:
    """1e-50 against 1e-52: both are 0, so place breaks the tie, the same way each time, parents before children."""
    tiny = grow([[[(1e-25, 1), (1e-26, 2)]], [[(1e-25, 3), (0.0, 4)], [(1e-26, 5), (0.0, 6)]]], topk=2)
    assert [float(node.score) for node in tiny[0][2:]] == [0.0] * 4
    for n, picks in ((3, [0, 1]), (4, [0, 1, 2]), (5, [0, 1, 2, 3])):
        _, kept, _ = organize_draft_results(*levels_of([tiny], 2), n)
        assert kept.tolist() == [picks]


def test_no_requests() -> None:
    none = [(torch.zeros(0, 1, 2), torch.zeros(0, 2).long(), torch.zeros(0, 3).long())]
    none += [(torch.zeros(0, 2, 2), torch.zeros(0, 4).long(), torch.zeros(0, 2).long())]
    scores, tokens, parents = (list(column) for column in zip(*none, strict=True))
    parent_list, kept, kept_tokens = organize_draft_results(scores, tokens, parents, 4)
    assert [t.shape for t in (parent_list, kept, kept_tokens)] == [(0, 3), (0, 3), (0, 3)]
