"""Links, mask and positions of the kept candidates, against a tree that is built node by node."""

from __future__ import annotations

import random

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from builders import candidates_of
from hypothesis import given
from hypothesis import strategies as st
from reference import Node, best_first, grow, tree_of_kept

from refspec.kernels import build_tree
from refspec.kernels.backend import tl, triton
from refspec.kernels.build_tree import build_tree_torch, build_tree_triton
from refspec.kernels.tree_mask import full_row_start, new_mask


def random_pool(rng: random.Random, topk: int, steps: int) -> list[Node]:
    """A pool as the draft loop makes it; of the probabilities, many tie and some are 0."""

    def below() -> list[tuple[float, int]]:
        return [(rng.choice([0.0, 0.1, 0.5, 0.5, 0.9, 1.0, rng.random()]), rng.randrange(50)) for _ in range(topk)]

    return grow([[below() for _ in range(1 if level == 0 else topk)] for level in range(steps)], topk)[0]


def parent_list_of(pool: list[Node], topk: int, steps: int) -> list[int]:
    """Entry g: who the candidates i with i // k = g hang under; the last level, which has none, is left out."""
    return [] if steps == 1 else [pool[g * topk].parent for g in range(len(pool) // topk)][: topk * (steps - 1) + 1]


def packed_rows(mask: list[list[bool]]) -> list[int]:
    """The bytes of each row's word, lowest first."""
    n = len(mask)
    size = 1 if n <= 8 else 2 if n <= 16 else 4
    words = [sum(seen << column for column, seen in enumerate(row)) for row in mask]
    return [byte for word in words for byte in word.to_bytes(size, "little")]


@both_backends
@given(
    seed=st.integers(0, 10_000),
    topk=st.integers(1, 5),
    steps=st.integers(1, 5),
    size=st.floats(0, 1),
    seq_lens=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    mode=st.sampled_from(["full", "qlen", "packed"]),
)
def test_as_built_node_by_node(
    backend: str, seed: int, topk: int, steps: int, size: float, seq_lens: list[int], mode: str
) -> None:
    rng = random.Random(seed)
    pools = [random_pool(rng, topk, steps) for _ in seq_lens]
    n = 2 + round(size * (min(candidates_of(topk, steps), 31 if mode == "packed" else 39) - 1))
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

    mask, positions, index, child, sibling = build_tree(*arguments, mode, backend=backend)
    assert positions.tolist() == [p for tree in trees for p in tree.positions]
    assert index.tolist() == [list(range(r * n, (r + 1) * n)) for r in range(len(trees))]
    assert child.tolist() == [tree.first_child for tree in trees]
    assert sibling.tolist() == [tree.next_sibling for tree in trees]
    assert {t.dtype for t in (positions, index, child, sibling)} == {torch.int64}
    assert mask.dtype == (torch.uint8 if mode == "packed" else torch.bool)
    if mode == "packed":
        assert mask.tolist() == [byte for tree in trees for byte in packed_rows(tree.mask)]
    else:
        assert mask.tolist() == [
            seen
            for tree, seq_len in zip(trees, seq_lens, strict=True)
            for row in tree.mask
            for seen in [True] * (seq_len if mode == "full" else 0) + row
        ]


def mask_rows(mask: torch.Tensor, n: int) -> list[str]:
    return ["".join(str(int(seen)) for seen in row) for row in mask.view(-1, n).tolist()]


@both_backends
@pytest.mark.parametrize("seq_len", [1, 40])
def test_TREE_04_one_step(backend: str, seq_len: int) -> None:
    """The parent list is empty: all candidates hang under the root."""
    mask, positions, _, child, sibling = build_tree(
        torch.zeros(1, 0, dtype=torch.int64),
        torch.tensor([[0, 1]]),
        torch.tensor([seq_len]),
        2,
        1,
        3,
        "qlen",
        backend=backend,
    )
    assert child.tolist() == [[1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1]]
    assert positions.tolist() == [seq_len, seq_len + 1, seq_len + 1]
    assert mask_rows(mask, 3) == ["100", "110", "101"]


@both_backends
def test_TREE_05_a_node_sees_its_ancestors_and_nobody_else(backend: str) -> None:
    """A and B under the root, C under A: B is no concern of C's."""
    mask, positions, _, child, sibling = build_tree(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]]), torch.tensor([7]), 2, 2, 4, "qlen", backend=backend
    )
    assert child.tolist() == [[1, 3, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1]]
    assert mask_rows(mask, 4) == ["1000", "1100", "1010", "1101"]
    assert positions.tolist() == [7, 8, 8, 9]


@both_backends
def test_TREE_01_chain_by_the_general_path(backend: str) -> None:
    """k = 1: with as many nodes as steps + 1, and with one less."""
    for n, chain in ((4, [0, 1, 2]), (3, [0, 1])):
        mask, positions, _, child, sibling = build_tree(
            torch.tensor([[-1, 0, 1]]), torch.tensor([chain]), torch.tensor([5]), 1, 3, n, "qlen", backend=backend
        )
        assert child.tolist() == [[*range(1, n), -1]]
        assert sibling.tolist() == [[-1] * n]
        assert positions.tolist() == list(range(5, 5 + n))
        assert mask_rows(mask, n) == ["1" * (row + 1) + "0" * (n - row - 1) for row in range(n)]


@both_backends
@pytest.mark.parametrize(("mode", "dtype"), [("full", torch.bool), ("qlen", torch.bool), ("packed", torch.uint8)])
@pytest.mark.parametrize(("topk", "steps", "n"), [(1, 1, 2), (2, 3, 6)])
def test_no_requests(backend: str, mode: str, dtype: torch.dtype, topk: int, steps: int, n: int) -> None:
    width = topk * (steps - 1) + 1 if steps > 1 else 0
    none = torch.zeros(0, width, dtype=torch.int64)
    no_kept, no_lens = torch.zeros(0, n - 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    mask, positions, *links = build_tree(none, no_kept, no_lens, topk, steps, n, mode, backend=backend)
    assert (mask.shape, mask.dtype) == ((0,), dtype)
    assert (positions.shape, positions.dtype) == ((0,), torch.int64)
    assert [(t.shape, t.dtype) for t in links] == [((0, n), torch.int64)] * 3


@both_backends
def test_the_root_alone(backend: str) -> None:
    mask, positions, index, child, sibling = build_tree(
        torch.tensor([[-1, 0, 1]] * 2),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.tensor([2, 0]),
        2,
        2,
        1,
        "full",
        backend=backend,
    )
    assert mask.tolist() == [True] * 4
    assert positions.tolist() == [2, 0]
    assert index.tolist() == [[0], [1]]
    assert child.tolist() == sibling.tolist() == [[-1], [-1]]


@pytest.mark.parametrize(
    ("mode", "n"),
    [(mode, n) for mode in ("full", "qlen", "packed") for n in (1, 5, 7, 8, 9, 33 if mode != "packed" else 32)],
)
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(mode: str, n: int) -> None:
    pools = [random_pool(random.Random(seed), 4, 3) for seed in (n, n + 1)]
    kept = [sorted(best_first(pool, range(len(pool)))[: n - 1]) for pool in pools]
    tensors = (
        torch.tensor([parent_list_of(pool, 4, 3) for pool in pools]),
        torch.tensor(kept, dtype=torch.int64).view(2, n - 1),
        torch.tensor([3, 2]),
    )
    with guarded_outputs():
        ours = build_tree_triton(*map(among_nonsense, tensors), 4, 3, n, mode)
    for name, one, other in zip(
        "mask positions index child sibling".split(), ours, build_tree_torch(*tensors, 4, 3, n, mode), strict=True
    ):
        assert torch.equal(one, other), name


@triton.jit
def store_row_starts(seq_lens, starts, n, B_UPPER: tl.constexpr, ROWS: tl.constexpr):
    """starts (b, n): where `store_mask` puts the rows of a full mask."""
    r = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    tl.store(starts + r * n + row, full_row_start(seq_lens, r, row, n, B_UPPER), row < n)


@needs_interpreter
@pytest.mark.parametrize("seq_len", [1_000_000, 2**27])
def test_TRI_05_places_in_a_full_mask_pass_2_to_the_31(seq_len: int) -> None:
    """64 requests of 64 nodes: the mask has no room in memory here, its places are computed as for any other."""
    b, n = 64, 64
    starts = torch.zeros(b, n, dtype=torch.int64)
    store_row_starts[(b,)](torch.full((b,), seq_len), starts, n, B_UPPER=64, ROWS=64)
    row_length = seq_len + n
    assert starts.tolist() == [[(r * n + row) * row_length + seq_len for row in range(n)] for r in range(b)]
    assert starts[-1, -1] + n == b * n * row_length > 2**31


def test_TRI_05_the_size_of_a_full_mask_is_not_cut_to_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", lambda size, **_: size)
    assert new_mask(torch.full((64,), 1_000_000), 64, "full", None) == 64 * 64 * (1_000_000 + 64)


@both_backends
@pytest.mark.parametrize("mode", ["full", "qlen", "packed"])
def test_who_says_what_the_lengths_add_up_to_gets_the_same(mode: str, backend: str) -> None:
    tree = a_tree(seq_lens=torch.tensor([7]), mask_mode=mode, backend=backend)
    for one, other in zip(build_tree(**tree), build_tree(**tree, seq_lens_sum=7), strict=True):  # type: ignore[arg-type]
        assert torch.equal(one, other)


@needs_interpreter
def test_nobody_waits_for_the_size_of_a_full_mask_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where values are not looked at: no sum of lengths is asked of the device."""
    monkeypatch.setattr(torch.Tensor, "sum", None)
    assert len(new_mask(torch.tensor([7, 2]), 4, "full", 9)) == 4 * (9 + 8)
    with pytest.raises(TypeError):
        new_mask(torch.tensor([7, 2]), 4, "full", None)


def test_unknown_mask_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask_mode is 'diagonal', it must be one of: full, qlen, packed"):
        build_tree(torch.tensor([[-1, 0]]), torch.tensor([[0]]), torch.tensor([1]), 1, 2, 2, "diagonal")


def a_tree(**changed: object) -> dict[str, object]:
    """Arguments that are right but for what is changed."""
    right = {
        "parent_list": torch.tensor([[-1, 0, 1]]),
        "top_scores_index": torch.tensor([[0, 1, 2]]),
        "seq_lens": torch.tensor([7]),
        "topk": 2,
        "num_steps": 2,
        "num_draft_tokens": 4,
    }
    return {**right, **changed}


@both_backends
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"topk": 0}, ValueError, "topk is 0, it must be at least 1"),
        ({"num_steps": -1}, ValueError, "num_steps is -1, it must be at least 1"),
        ({"num_steps": 2.0}, TypeError, "num_steps is 2.0, it must be an int"),
        ({"num_draft_tokens": 8}, ValueError, "num_draft_tokens is 8, it must be at least 1 and at most 7"),
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens is 0, it must be at least 1"),
        ({"num_draft_tokens": 3}, ValueError, r"top_scores_index has shape \(1, 3\), it must be \(1, 2\)"),
        ({"parent_list": torch.tensor([[-1, 0]])}, ValueError, r"parent_list has shape \(1, 2\), it must be \(1, 3\)"),
        (
            {"parent_list": torch.tensor([[-1, 0, 1]]).int()},
            ValueError,
            "parent_list is torch.int32, it must be torch.int64",
        ),
        ({"parent_list": [[-1, 0, 1]]}, TypeError, "parent_list is list, it must be a tensor"),
        ({"seq_lens": torch.tensor([7, 7])}, ValueError, r"parent_list has shape \(1, 3\), it must be \(2, 3\)"),
        ({"seq_lens": torch.tensor([-1])}, ValueError, "seq_lens has entries from -1 to -1"),
        ({"seq_lens": torch.empty(1, dtype=torch.int64, device="meta")}, ValueError, "parent_list is on cpu"),
        ({"top_scores_index": torch.tensor([[0, 9, 1, 9, 2, 9]])[:, ::2]}, ValueError, "top_scores_index has strides"),
        ({"top_scores_index": torch.tensor([[0, 1, 6]])}, ValueError, "top_scores_index has entries from 0 to 6"),
        ({"top_scores_index": torch.tensor([[0, 2, 1]])}, ValueError, "top_scores_index does not ascend"),
        ({"top_scores_index": torch.tensor([[0, 1, 1]])}, ValueError, "top_scores_index does not ascend"),
        (
            {"top_scores_index": torch.tensor([[1, 2, 3]])},
            ValueError,
            "top_scores_index keeps a candidate whose parent",
        ),
        ({"parent_list": torch.tensor([[-1, 0, 6]])}, ValueError, "parent_list has entries from -1 to 6"),
        ({"parent_list": torch.tensor([[0, 0, 1]])}, ValueError, "parent_list hangs a candidate"),
        ({"parent_list": torch.tensor([[-1, 2, 1]])}, ValueError, "parent_list hangs a candidate"),
        ({"parent_list": torch.tensor([[-1, -1, 1]])}, ValueError, "parent_list hangs a candidate"),
        ({"seq_lens_sum": 6}, ValueError, "seq_lens_sum is 6, seq_lens add up to 7"),
        ({"seq_lens_sum": -1}, ValueError, "seq_lens_sum is -1"),
        ({"seq_lens": [7]}, TypeError, "seq_lens is list, it must be a tensor"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(
    backend: str, changed: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_tree(**a_tree(**changed), backend=backend)  # type: ignore[arg-type]


@both_backends
def test_a_packed_row_holds_32_columns_at_most(backend: str) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens is 33, a packed row has 32 bits at most"):
        build_tree(**a_tree(topk=8, num_draft_tokens=33), mask_mode="packed", backend=backend)  # type: ignore[arg-type]
