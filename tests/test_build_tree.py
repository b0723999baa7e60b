"""Links, mask and positions of the kept candidates, against a tree that is built node by node."""

from __future__ import annotations

import random

import pytest
import torch
from builders import candidates_of
from hypothesis import given
from hypothesis import strategies as st
from reference import Node, best_first, grow, tree_of_kept

from refspec.kernels import build_tree


def random_pool(rng: random.Random, topk: int, steps: int) -> list[Node]:
    """A pool as the draft loop makes it; of the probabilities, many tie and some are 0."""

    def below() -> list[tuple[float, int]]:
        return [(rng.choice([0.0, 0.1, 0.5, 0.5, 0.9, 1.0, rng.random()]), rng.randrange(50)) for _ in range(topk)]

    return grow([[below() for _ in range(1 if level == 0 else topk)] for level in range(steps)], topk)[0]


def parent_list_of(pool: list[Node], topk: int, steps: int) -> list[int]:
    """Entry g: who the candidates i with i // k = g hang under; the last level, which has none, is left out."""
    return [] if steps == 1 else [pool[g * topk].parent for g in range(len(pool) // topk)][: topk * (steps - 1) + 1]


@given(
    seed=st.integers(0, 10_000),
    topk=st.integers(1, 5),
    steps=st.integers(1, 5),
    size=st.floats(0, 1),
    seq_lens=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_as_built_node_by_node(seed: int, topk: int, steps: int, size: float, seq_lens: list[int]) -> None:
    rng = random.Random(seed)
    pools = [random_pool(rng, topk, steps) for _ in seq_lens]
    n = 2 + round(size * (candidates_of(topk, steps) - 1))
    kept = [sorted(best_first(pool, range(len(pool)))[: n - 1]) for pool in pools]
    arguments = (
        torch.tensor([parent_list_of(pool, topk, steps) for pool in pools], dtype=torch.int64),
        torch.tensor(kept),
        torch.tensor(seq_lens),
        topk,
        steps,
        n,
    )
    trees = [tree_of_kept(*parts) for parts in zip(pools, kept, seq_lens, strict=True)]

    full_mask, positions, index, child, sibling = build_tree(*arguments)
    assert positions.tolist() == [p for tree in trees for p in tree.positions]
    assert index.tolist() == [list(range(r * n, (r + 1) * n)) for r in range(len(trees))]
    assert child.tolist() == [tree.first_child for tree in trees]
    assert sibling.tolist() == [tree.next_sibling for tree in trees]
    assert full_mask.tolist() == [
        seen
        for tree, seq_len in zip(trees, seq_lens, strict=True)
        for row in tree.mask
        for seen in [True] * seq_len + row
    ]

    qlen_mask, *others = build_tree(*arguments, mask_mode="qlen")
    assert qlen_mask.tolist() == [seen for tree in trees for row in tree.mask for seen in row]
    for ours, theirs in zip(others, (positions, index, child, sibling), strict=True):
        assert torch.equal(ours, theirs)
    assert full_mask.dtype == qlen_mask.dtype == torch.bool
    assert {t.dtype for t in others} == {torch.int64}


def mask_rows(mask: torch.Tensor, n: int) -> list[str]:
    return ["".join(str(int(seen)) for seen in row) for row in mask.view(-1, n).tolist()]


@pytest.mark.parametrize("seq_len", [1, 40])
def test_TREE_04_one_step(seq_len: int) -> None:
    """The parent list is empty: all candidates hang under the root."""
    mask, positions, _, child, sibling = build_tree(
        torch.zeros(1, 0, dtype=torch.int64), torch.tensor([[0, 1]]), torch.tensor([seq_len]), 2, 1, 3, "qlen"
    )
    assert child.tolist() == [[1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1]]
    assert positions.tolist() == [seq_len, seq_len + 1, seq_len + 1]
    assert mask_rows(mask, 3) == ["100", "110", "101"]


def test_TREE_05_a_node_sees_its_ancestors_and_nobody_else() -> None:
    """A and B under the root, C under A: B is no concern of C's."""
    mask, positions, _, child, sibling = build_tree(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]]), torch.tensor([7]), 2, 2, 4, "qlen"
    )
    assert child.tolist() == [[1, 3, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1]]
    assert mask_rows(mask, 4) == ["1000", "1100", "1010", "1101"]
    assert positions.tolist() == [7, 8, 8, 9]


def test_TREE_01_chain_by_the_general_path() -> None:
    """k = 1: with as many nodes as steps + 1, and with one less."""
    for n, chain in ((4, [0, 1, 2]), (3, [0, 1])):
        mask, positions, _, child, sibling = build_tree(
            torch.tensor([[-1, 0, 1]]), torch.tensor([chain]), torch.tensor([5]), 1, 3, n, "qlen"
        )
        assert child.tolist() == [[*range(1, n), -1]]
        assert sibling.tolist() == [[-1] * n]
        assert positions.tolist() == list(range(5, 5 + n))
        assert mask_rows(mask, n) == ["1" * (row + 1) + "0" * (n - row - 1) for row in range(n)]


@pytest.mark.parametrize("mode", ["full", "qlen"])
@pytest.mark.parametrize(("topk", "steps", "n"), [(1, 1, 2), (2, 3, 6)])
def test_no_requests(mode: str, topk: int, steps: int, n: int) -> None:
    width = topk * (steps - 1) + 1 if steps > 1 else 0
    none = torch.zeros(0, width, dtype=torch.int64)
    mask, positions, *links = build_tree(
        none, torch.zeros(0, n - 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), topk, steps, n, mode
    )
    assert (mask.shape, mask.dtype) == ((0,), torch.bool)
    assert (positions.shape, positions.dtype) == ((0,), torch.int64)
    assert [(t.shape, t.dtype) for t in links] == [((0, n), torch.int64)] * 3


def test_unknown_mask_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask_mode is 'diagonal', it must be one of: full, qlen"):
        build_tree(torch.tensor([[-1]]), torch.tensor([[0]]), torch.tensor([1]), 1, 2, 2, "diagonal")
