"""The walk down the tree, against one that looks at all nodes at every step."""

from __future__ import annotations

import random

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given
from hypothesis import strategies as st
from reference import Tree, tree_of, walk

from refspec.kernels import verify_tree_greedy
from refspec.kernels.verify_tree_greedy import verify_tree_greedy_torch, verify_tree_greedy_triton
from refspec.runtime.runner import greedy_choice


def verify(
    backend: str, tokens: list[list[int]], trees: list[Tree], choices: list[list[int]], steps: int
) -> tuple[list[int], list[list[int]], list[int]]:
    n = len(tokens[0])
    outputs = verify_tree_greedy(
        torch.tensor(tokens),
        torch.arange(len(tokens) * n).view(-1, n),
        torch.tensor([tree.first_child for tree in trees]),
        torch.tensor([tree.next_sibling for tree in trees]),
        torch.tensor(choices),
        steps,
        backend,
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


@both_backends
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 3), n=st.integers(2, 14), steps=st.integers(1, 6))
def test_as_by_looking_at_all_nodes(backend: str, seed: int, batch: int, n: int, steps: int) -> None:
    rng = random.Random(seed)
    parents = [random_parents(rng, n, steps) for _ in range(batch)]
    tokens = [[rng.randrange(1, 4) for _ in range(n)] for _ in range(batch)]
    choices = [[rng.randrange(1, 4) for _ in range(n)] for _ in range(batch)]
    predict, accept_index, accept_token_num = verify(backend, tokens, [tree_of(p, 5) for p in parents], choices, steps)

    paths = [walk(*parts) for parts in zip(tokens, parents, choices, strict=True)]
    assert accept_token_num == [len(path) - 1 for path in paths]
    assert accept_index == [
        [r * n + column for column in path] + [-1] * (steps + 1 - len(path)) for r, path in enumerate(paths)
    ]
    assert predict == [choices[r][c] if c in paths[r] else 0 for r in range(batch) for c in range(n)]


def chain(n: int) -> Tree:
    return tree_of([-1, *range(n - 1)], 5)


@both_backends
@pytest.mark.parametrize("n", [2, 3, 5])
def test_VER_01_first_draft_is_checked_like_any_other(backend: str, n: int) -> None:
    """Root 3, drafts 9, the target wants 4 at the root: nothing is accepted, the output is 4."""
    predict, accept_index, accepted = verify(backend, [[3] + [9] * (n - 1)], [chain(n)], [[4] + [9] * (n - 1)], n - 1)
    assert accepted == [0]
    assert accept_index == [[0] + [-1] * (n - 1)]
    assert predict == [4] + [0] * (n - 1)


@both_backends
@pytest.mark.parametrize("wrong_at", range(5))
def test_VER_01_each_draft_is_compared_with_the_row_of_its_parent(backend: str, wrong_at: int) -> None:
    """Drafts 11 12 13 14 after root 10; the target agrees up to one of them, then says 99."""
    choices = [11 + row if row < wrong_at else 99 for row in range(5)]
    predict, _, accepted = verify(backend, [[10, 11, 12, 13, 14]], [chain(5)], [choices], 4)
    assert accepted == [wrong_at]
    assert predict == [*choices[: wrong_at + 1], *[0] * (4 - wrong_at)]


@both_backends
def test_agreement_below_a_rejected_node_does_not_count(backend: str) -> None:
    predict, _, accepted = verify(backend, [[10, 11, 12]], [chain(3)], [[50, 12, 13]], 2)
    assert accepted == [0]
    assert predict == [50, 0, 0]


@both_backends
def test_second_sibling_is_accepted_with_its_own_children(backend: str) -> None:
    """The root's children 5 and 6 both have a child 7; the target says 6, then 7, then 8."""
    tree = tree_of([-1, 0, 0, 1, 2], 5)
    predict, accept_index, accepted = verify(backend, [[1, 5, 6, 7, 7]], [tree], [[6, 9, 7, 9, 8]], 2)
    assert accepted == [2]
    assert accept_index == [[0, 2, 4]]
    assert predict == [6, 0, 7, 0, 8]


@both_backends
def test_rows_of_the_second_request_are_global(backend: str) -> None:
    predict, accept_index, accepted = verify(backend, [[1, 2], [3, 4]], [chain(2), chain(2)], [[9, 9], [4, 5]], 1)
    assert accepted == [0, 1]
    assert accept_index == [[0, -1], [2, 3]]
    assert predict == [9, 0, 4, 5]


@both_backends
def test_VER_01_a_draft_found_by_n_grams_is_checked_too(backend: str) -> None:
    """The prompt 6 6 6 drafts 6; the target wants 4."""
    predict, accept_index, accepted = verify(backend, [[6, 6]], [chain(2)], [[4, 6]], 1)
    assert (predict, accept_index, accepted) == ([4, 0], [[0, -1]], [0])


@both_backends
def test_VER_02_equal_logits_accept_the_lower_id_wherever_it_stands(backend: str) -> None:
    """The target's two best logits tie: its choice is id 1, be it the first sibling or the second."""
    choices = greedy_choice(torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 3)).tolist()
    tree = tree_of([-1, 0, 0], 5)
    for siblings, accepted_row in (([1, 2], 1), ([2, 1], 2)):
        predict, accept_index, accepted = verify(backend, [[0, *siblings]], [tree], [choices], 1)
        assert accepted == [1]
        assert accept_index == [[0, accepted_row]]
        assert [predict[0], predict[accepted_row]] == [1, 1]


@both_backends
def test_of_siblings_with_one_token_the_first_in_the_list_is_accepted(backend: str) -> None:
    """The list begins at the node's first child; the columns need not ascend along it: 2, then 1, then 3."""
    outputs = verify_tree_greedy(
        torch.tensor([[0, 7, 7, 7]]),
        torch.arange(4).view(1, 4),
        torch.tensor([[2, -1, -1, -1]]),
        torch.tensor([[-1, 3, 1, -1]]),
        torch.tensor([[7, 8, 9, 8]]),
        1,
        backend,
    )
    assert [output.tolist() for output in outputs] == [[7, 0, 9, 0], [[0, 2]], [1]]


@both_backends
@pytest.mark.parametrize(("n", "steps"), [(1, 0), (1, 3), (4, 0)])
def test_TRI_07_no_draft_or_no_step_returns_at_once(backend: str, n: int, steps: int) -> None:
    """The loop has nothing to do: no draft is accepted, and the bonus is the root's."""
    predict, accept_index, accepted = verify(backend, [[5] * n] * 2, [chain(n)] * 2, [[5] * n] * 2, steps)
    assert accepted == [0, 0]
    assert accept_index == [[0] + [-1] * steps, [n] + [-1] * steps]
    assert predict == ([5] + [0] * (n - 1)) * 2


@both_backends
@pytest.mark.parametrize("steps", [2, 6, 40])
def test_the_longest_path_has_as_many_drafts_as_steps(backend: str, steps: int) -> None:
    """All drafts of a chain of 7 nodes are right."""
    predict, accept_index, accepted = verify(backend, [[4] * 7], [chain(7)], [[4] * 7], steps)
    drafts = min(steps, 6)
    assert accepted == [drafts]
    assert accept_index == [[*range(drafts + 1)] + [-1] * (steps - drafts)]
    assert predict == [4] * (drafts + 1) + [0] * (6 - drafts)


@both_backends
@pytest.mark.parametrize(("n", "steps"), [(2, 1), (6, 3)])
def test_no_requests(backend: str, n: int, steps: int) -> None:
    none = torch.zeros(0, n, dtype=torch.int64)
    outputs = verify_tree_greedy(none, none, none, none, none, steps, backend)
    assert [(t.shape, t.dtype) for t in outputs] == [
        ((0,), torch.int32),
        ((0, steps + 1), torch.int32),
        ((0,), torch.int32),
    ]


@pytest.mark.parametrize("n", [1, 5, 7, 8, 9, 33])
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(n: int) -> None:
    rng = random.Random(n)
    trees = [tree_of(random_parents(rng, n, 5), 5), chain(n)]
    tensors = (
        torch.tensor([[rng.randrange(2) for _ in range(n)], [1] * n]),
        torch.arange(2 * n).view(2, n),
        torch.tensor([tree.first_child for tree in trees]),
        torch.tensor([tree.next_sibling for tree in trees]),
        torch.tensor([[rng.randrange(2) for _ in range(n)], [1] * n]),
    )
    with guarded_outputs():
        ours = verify_tree_greedy_triton(*map(among_nonsense, tensors), 5)
    for one, other in zip(ours, verify_tree_greedy_torch(*tensors, 5), strict=True):
        assert torch.equal(one, other)


@needs_interpreter
def test_links_in_a_ring_do_not_hang_the_kernel() -> None:
    """Columns 1 and 2 name each other as sibling; where values are not checked, such links reach the kernel."""
    tokens = torch.tensor([[5, 6, 7]])
    child, sibling = torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, 1]])
    predict, accept_index, accepted = verify_tree_greedy_triton(
        tokens, torch.tensor([[0, 1, 2]]), child, sibling, torch.tensor([[9, 9, 9]]), 2
    )
    assert predict.tolist() == [9, 0, 0]
    assert accept_index.tolist() == [[0, -1, -1]]
    assert accepted.tolist() == [0]


@both_backends
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_steps": -1}, ValueError, "num_steps is -1, it must be at least 0"),
        ({"num_steps": True}, TypeError, "num_steps is True, it must be an int"),
        ({"candidates": torch.tensor([5, 6, 7])}, ValueError, r"candidates has shape \(3,\), it must be \(any, any\)"),
        ({"candidates": torch.zeros(1, 0).long()}, ValueError, "candidates' last size is 0, it must be at least 1"),
        ({"candidates": torch.tensor([[5, 6, 7]]).int()}, ValueError, "candidates is torch.int32"),
        ({"target_predict": torch.tensor([[5, 6]])}, ValueError, r"target_predict has shape \(1, 2\)"),
        ({"target_predict": torch.tensor([[5.0, 6, 7]])}, ValueError, "target_predict is torch.float32"),
        ({"target_predict": torch.zeros(1, 6).long()[:, ::2]}, ValueError, "target_predict has strides"),
        ({"target_predict": torch.zeros(1, 3, device="meta").long()}, ValueError, "target_predict is on meta"),
        (
            {"retrieve_index": torch.tensor([[0, 2, 1]])},
            ValueError,
            r"retrieve_index has other entries than request \* 3",
        ),
        (
            {"retrieve_next_token": torch.tensor([[1, -1, 3]])},
            ValueError,
            "retrieve_next_token has entries from -1 to 3",
        ),
        ({"retrieve_next_token": torch.tensor([[1, -2, -1]])}, ValueError, "retrieve_next_token has entries from -2"),
        ({"retrieve_next_sibling": torch.tensor([[-1, 3, -1]])}, ValueError, "retrieve_next_sibling has entries from"),
        ({"retrieve_next_sibling": torch.tensor([[-1, 2, 1]])}, ValueError, "twice to the same column"),
        ({"retrieve_next_token": torch.tensor([[1, -1, 0]])}, ValueError, "lead to the root"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(
    backend: str, changed: dict[str, object], error: type[Exception], message: str
) -> None:
    right = {
        "candidates": torch.tensor([[5, 6, 7]]),
        "retrieve_index": torch.tensor([[0, 1, 2]]),
        "retrieve_next_token": torch.tensor([[1, -1, -1]]),
        "retrieve_next_sibling": torch.tensor([[-1, 2, -1]]),
        "target_predict": torch.tensor([[6, 7, 8]]),
        "num_steps": 2,
    }
    with pytest.raises(error, match=message):
        verify_tree_greedy(**{**right, **changed}, backend=backend)  # type: ignore[arg-type]
