"""The links out of a mask are those of the tree that the mask was made of."""

from __future__ import annotations

import random

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given
from hypothesis import strategies as st
from reference import Tree, tree_of

from refspec.kernels import links_from_mask
from refspec.kernels.links_from_mask import links_from_mask_torch, links_from_mask_triton


def random_tree(rng: random.Random, n: int) -> Tree:
    """Any shape; parents before their children, in any order otherwise."""
    reach = rng.choice([1, 2, 5, n])
    return tree_of([-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, n))], 0)


def links(mask: torch.Tensor, backend: str) -> list[list[list[int]]]:
    outputs = links_from_mask(mask, backend)
    assert {output.dtype for output in outputs} == {torch.int64}
    return [output.tolist() for output in outputs]


@both_backends
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 3), n=st.integers(1, 40))
def test_as_in_the_tree_that_the_mask_was_made_of(backend: str, seed: int, batch: int, n: int) -> None:
    trees = [random_tree(random.Random(seed + r), n) for r in range(batch)]
    assert links(torch.tensor([tree.mask for tree in trees]), backend) == [
        [list(range(r * n, (r + 1) * n)) for r in range(batch)],
        [tree.first_child for tree in trees],
        [tree.next_sibling for tree in trees],
    ]


@both_backends
def test_TREE_05_by_hand(backend: str) -> None:
    """Rows 1000, 1100, 1010, 1101: A and B under the root, C under A."""
    mask = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool()
    assert links(mask, backend) == [[[0, 1, 2, 3]], [[1, 3, -1, -1]], [[-1, 2, -1, -1]]]


@both_backends
def test_from_the_diagonal_on_the_mask_is_not_looked_at(backend: str) -> None:
    tree = random_tree(random.Random(3), 11)
    mask = torch.tensor([tree.mask])
    late = torch.ones(11, 11, dtype=torch.bool).triu()
    assert links(mask | late, backend) == links(mask & ~late, backend) == links(mask, backend)


@both_backends
def test_nodes_that_hang_nowhere_are_no_siblings(backend: str) -> None:
    """Two trees in one mask: 0 with child 2, and 1 with children 3 and 4."""
    rows = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 1, 0, 0, 1]]
    assert links(torch.tensor([rows]).bool(), backend)[1:] == [[[2, 3, -1, -1, -1]], [[-1, -1, -1, 4, -1]]]


@both_backends
def test_the_root_alone_and_no_requests(backend: str) -> None:
    assert links(torch.ones(2, 1, 1).bool(), backend) == [[[0], [1]], [[-1], [-1]], [[-1], [-1]]]
    assert [output.shape for output in links_from_mask(torch.zeros(0, 3, 3).bool(), backend)] == [(0, 3)] * 3


@pytest.mark.parametrize("n", [1, 5, 7, 8, 9, 33])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(n: int) -> None:
    mask = torch.tensor([random_tree(random.Random(seed), n).mask for seed in (n, n + 1)])
    with guarded_outputs():
        ours = links_from_mask_triton(among_nonsense(mask))
    for one, other in zip(ours, links_from_mask_torch(mask), strict=True):
        assert torch.equal(one, other)


@both_backends
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3, 3), "qlen_mask is torch.float32, it must be torch.bool"),
        (torch.ones(3, 3).bool(), r"qlen_mask has shape \(3, 3\), it must be \(any, any, any\)"),
        (torch.ones(2, 3, 4).bool(), r"qlen_mask has shape \(2, 3, 4\), it must be \(any, 4, any\)"),
        (torch.ones(2, 0, 0).bool(), "qlen_mask's last size is 0, it must be at least 1"),
        (torch.ones(3, 3, 2).bool().permute(2, 0, 1), "qlen_mask has strides"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(backend: str, mask: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        links_from_mask(mask, backend)
