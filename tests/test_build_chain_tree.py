"""A chain is the tree that the general way makes of it, in every form of the mask."""

from __future__ import annotations

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from hypothesis import given
from hypothesis import strategies as st

from refspec.kernels import build_chain_tree, build_tree
from refspec.kernels.build_chain_tree import build_chain_tree_torch, build_chain_tree_triton


@both_backends
@given(
    n=st.integers(2, 40),
    seq_lens=st.lists(st.integers(0, 9), max_size=3),
    mode=st.sampled_from(["full", "qlen", "packed"]),
)
def test_TREE_01_a_chain_is_what_the_general_path_makes_of_it(
    backend: str, n: int, seq_lens: list[int], mode: str
) -> None:
    """k = 1 and N = S + 1."""
    if mode == "packed":
        n = min(n, 32)
    lens = torch.tensor(seq_lens, dtype=torch.int64)
    width = n - 1 if n > 2 else 0
    parent_list = torch.arange(-1, width - 1).repeat(len(lens), 1)
    general = build_tree(
        parent_list, torch.arange(n - 1).repeat(len(lens), 1), lens, 1, n - 1, n, mode, backend="torch"
    )
    chain = build_chain_tree(lens, n, mode, seq_lens_sum=sum(seq_lens), backend=backend)
    for one, other in zip(chain, general, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


@both_backends
def test_TREE_01_by_hand(backend: str) -> None:
    """Steps 3: 4 draft tokens; then 3, which is a chain of 3 nodes."""
    for n in (4, 3):
        mask, positions, index, child, sibling = build_chain_tree(torch.tensor([5, 0]), n, "qlen", backend=backend)
        assert mask.view(2, n, n).tolist() == [[[c <= row for c in range(n)] for row in range(n)]] * 2
        assert positions.tolist() == [*range(5, 5 + n), *range(n)]
        assert index.tolist() == [[*range(n)], [*range(n, 2 * n)]]
        assert child.tolist() == [[*range(1, n), -1]] * 2
        assert sibling.tolist() == [[-1] * n] * 2


@both_backends
@pytest.mark.parametrize(
    ("mode", "mask"), [("full", [True] * 3), ("qlen", [True]), ("packed", [1])], ids=["full", "qlen", "packed"]
)
def test_the_root_alone(backend: str, mode: str, mask: list[object]) -> None:
    outputs = build_chain_tree(torch.tensor([2]), 1, mode, backend=backend)
    assert [output.tolist() for output in outputs] == [mask, [2], [[0]], [[-1]], [[-1]]]


@both_backends
def test_packed_words_are_little_endian(backend: str) -> None:
    mask = build_chain_tree(torch.tensor([3]), 10, "packed", backend=backend)[0]
    words = mask.view(10, 2).tolist()
    assert words[0] == [0b1, 0]
    assert words[7] == [0b11111111, 0]
    assert words[8] == [0b11111111, 0b1]
    assert words[9] == [0b11111111, 0b11]


@pytest.mark.parametrize(
    ("mode", "n"),
    [(mode, n) for mode in ("full", "qlen", "packed") for n in (1, 5, 7, 8, 9, 33 if mode != "packed" else 32)],
)
@needs_interpreter
def test_TRI_02_nothing_beside_the_buffers_is_touched(mode: str, n: int) -> None:
    seq_lens = torch.tensor([3, 0, 2])
    with guarded_outputs():
        ours = build_chain_tree_triton(among_nonsense(seq_lens), n, mode)
    for one, other in zip(ours, build_chain_tree_torch(seq_lens, n, mode), strict=True):
        assert torch.equal(one, other)


@both_backends
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.tensor([1]), 0, "qlen"), ValueError, "num_draft_tokens is 0, it must be at least 1"),
        ((torch.tensor([1]), 2.0, "qlen"), TypeError, "num_draft_tokens is 2.0, it must be an int"),
        ((torch.tensor([1]), 33, "packed"), ValueError, "num_draft_tokens is 33, a packed row has 32 bits at most"),
        (
            (torch.tensor([1]), 2, "diagonal"),
            ValueError,
            "mask_mode is 'diagonal', it must be one of: full, qlen, packed",
        ),
        ((torch.tensor([[1]]), 2, "qlen"), ValueError, r"seq_lens has shape \(1, 1\), it must be \(any\)"),
        ((torch.tensor([1]).int(), 2, "qlen"), ValueError, "seq_lens is torch.int32, it must be torch.int64"),
        ((torch.tensor([1, 2, 3])[::2], 2, "qlen"), ValueError, "seq_lens has strides"),
        ((torch.tensor([4, -2]), 2, "full"), ValueError, "seq_lens has entries from -2 to 4"),
        ((torch.tensor([4, 2]), 2, "full", 5), ValueError, "seq_lens_sum is 5, seq_lens add up to 6"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(
    backend: str, arguments: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_chain_tree(*arguments, backend=backend)  # type: ignore[arg-type]
