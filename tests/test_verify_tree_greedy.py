"""The walk down the tree, against one that looks at all nodes at every step."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import Tree, tree_of, walk

from refspec.kernels import verify_tree_greedy


def verify(
    tokens: list[list[int]], trees: list[Tree], choices: list[list[int]], steps: int
) -> tuple[list[int], list[list[int]], list[int]]:
    n = len(tokens[0])
    outputs = verify_tree_greedy(
        torch.tensor(tokens),
        torch.arange(len(tokens) * n).view(-1, n),
        torch.tensor([tree.first_child for tree in trees]),
        torch.tensor([tree.next_sibling for tree in trees]),
        torch.tensor(choices),
        steps,
    )
    assert {output.dtype for output in outputs} == {torch.int32}
    predict, accept_index, accept_token_num = outputs
    return predict.tolist(), accept_index.tolist(), accept_token_num.tolist()


def random_parents(rng: random.Random, n: int, steps: int) -> list[int]:
    parents, depth = [-1], [0]
    for _ in range(n - 1):
        parent = rng.choice([c for c in range(len(parents)) if depth[c] < steps])
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return parents


@given(seed=st.integers(0, 10_000), batch=st.integers(1, 3), n=st.integers(2, 14), steps=st.integers(1, 6))
def test_as_by_looking_at_all_nodes(seed: int, batch: int, n: int, steps: int) -> None:
    rng = random.Random(seed)
    parents = [random_parents(rng, n, steps) for _ in range(batch)]
    tokens = [[rng.randrange(1, 4) for _ in range(n)] for _ in range(batch)]
    choices = [[rng.randrange(1, 4) for _ in range(n)] for _ in range(batch)]
    predict, accept_index, accept_token_num = verify(tokens, [tree_of(p, 5) for p in parents], choices, steps)

    paths = [walk(*parts) for parts in zip(tokens, parents, choices, strict=True)]
    assert accept_token_num == [len(path) - 1 for path in paths]
    assert accept_index == [
        [r * n + column for column in path] + [-1] * (steps + 1 - len(path)) for r, path in enumerate(paths)
    ]
    assert predict == [choices[r][c] if c in paths[r] else 0 for r in range(batch) for c in range(n)]


def chain(n: int) -> Tree:
    return tree_of([-1, *range(n - 1)], 5)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_VER_01_first_draft_is_checked_like_any_other(n: int) -> None:
    """Root 3, drafts 9, the target wants 4 at the root: nothing is accepted, the output is 4."""
    predict, accept_index, accepted = verify([[3] + [9] * (n - 1)], [chain(n)], [[4] + [9] * (n - 1)], n - 1)
    assert accepted == [0]
    assert accept_index == [[0] + [-1] * (n - 1)]
    assert predict == [4] + [0] * (n - 1)


@pytest.mark.parametrize("wrong_at", range(5))
def test_VER_01_each_draft_is_compared_with_the_row_of_its_parent(wrong_at: int) -> None:
    """Drafts 11 12 13 14 after root 10; the target agrees up to one of them, then says 99."""
    choices = [11 + row if row < wrong_at else 99 for row in range(5)]
    predict, _, accepted = verify([[10, 11, 12, 13, 14]], [chain(5)], [choices], 4)
    assert accepted == [wrong_at]
    assert predict == [*choices[: wrong_at + 1], *[0] * (4 - wrong_at)]


def test_agreement_below_a_rejected_node_does_not_count() -> None:
    predict, _, accepted = verify([[10, 11, 12]], [chain(3)], [[50, 12, 13]], 2)
    assert accepted == [0]
    assert predict == [50, 0, 0]


def test_second_sibling_is_accepted_with_its_own_children() -> None:
    """The root's children 5 and 6 both have a child 7; the target says 6, then 7, then 8."""
    tree = tree_of([-1, 0, 0, 1, 2], 5)
    predict, accept_index, accepted = verify([[1, 5, 6, 7, 7]], [tree], [[6, 9, 7, 9, 8]], 2)
    assert accepted == [2]
    assert accept_index == [[0, 2, 4]]
    assert predict == [6, 0, 7, 0, 8]


def test_rows_of_the_second_request_are_global() -> None:
    predict, accept_index, accepted = verify([[1, 2], [3, 4]], [chain(2), chain(2)], [[9, 9], [4, 5]], 1)
    assert accepted == [0, 1]
    assert accept_index == [[0, -1], [2, 3]]
    assert predict == [9, 0, 4, 5]


@pytest.mark.parametrize(("n", "steps"), [(2, 1), (6, 3)])
def test_no_requests(n: int, steps: int) -> None:
    none = torch.zeros(0, n, dtype=torch.int64)
    outputs = verify_tree_greedy(none, none, none, none, none, steps)
    assert [(t.shape, t.dtype) for t in outputs] == [
        ((0,), torch.int32),
        ((0, steps + 1), torch.int32),
        ((0,), torch.int32),
    ]
