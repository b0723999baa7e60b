"""The chain's draft step: the best token, and the bookkeeping that goes with it."""

from __future__ import annotations

import random

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter
from pools import assert_rim_untouched
from torch import Tensor

from refspec.kernels import draft_topk1
from refspec.kernels.draft_topk1 import draft_topk1_triton
from refspec.oracle.operation import SMALL
from refspec.oracle.operations.draft_topk1 import OPERATION, edges

NAN, INF = float("nan"), float("inf")


def best(logits: Tensor, backend: str) -> list[int]:
    _, index = draft_topk1(logits, torch.zeros(len(logits), dtype=torch.int64), None, 0, backend)
    return index.flatten().tolist()


@both_backends
@pytest.mark.parametrize(
    ("row", "index"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),  # VER-02
        ([0.0, -0.0, 0.0], 0),
        ([-0.0, 0.0], 0),
        ([-5.0], 0),
        ([NAN, -7.0, NAN, -3.0], 3),
        ([NAN, -INF], 1),
        ([NAN, -3e38, -INF], 1),
        ([1.0, INF, NAN, INF], 1),
        ([-INF, -INF, -INF], 0),
        ([NAN, NAN, NAN], 0),
        ([-INF, NAN, -INF], 0),
    ],
)
def test_VER_02_ties_go_to_the_lowest_and_nan_loses(row: list[float], index: int, backend: str) -> None:
    assert best(torch.tensor([row]), backend) == [index]


@both_backends
def test_what_is_returned_and_what_is_changed(backend: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    positions, draft_tokens = torch.tensor([7, 40]), torch.full((2, 4), -1)
    topk_p, topk_index = draft_topk1(logits, positions, draft_tokens, 2, backend)
    assert (topk_p.dtype, topk_p.tolist()) == (torch.float32, [[1.0], [1.0]])
    assert (topk_index.dtype, topk_index.tolist()) == (torch.int64, [[1], [0]])
    assert positions.tolist() == [8, 41]
    assert draft_tokens.tolist() == [[-1, -1, 1, -1], [-1, -1, 0, -1]]


@both_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 33, 1000, 2048, 2049, 5000])
def test_any_dtype_and_vocabulary(vocab: int, dtype: torch.dtype, backend: str) -> None:
    """Rounded to few values, so that most maxima are ties, some of them in other tiles."""
    logits = (torch.randn(3, vocab) * 2).round().to(dtype)
    expected = [max(range(vocab), key=lambda i: (row[i], -i)) for row in logits.tolist()]
    assert best(logits, backend) == expected


@both_backends
def test_the_logits_of_a_padded_head(backend: str) -> None:
    """What lies behind the vocabulary is larger, and is not looked at."""
    padded = torch.full((3, 40), 100.0)
    logits, block = padded[:, :33], torch.full((3, 6), -1)
    logits.copy_(torch.rand(3, 33))
    draft_tokens = block[:, 1:4]
    _, index = draft_topk1(logits, torch.zeros(3).long(), draft_tokens, 0, backend)
    assert index.flatten().tolist() == logits.argmax(1).tolist()
    assert block[:, 1].tolist() == index.flatten().tolist()
    assert bool((block[:, [0, 2, 3, 4, 5]] == -1).all())


@needs_interpreter
@pytest.mark.parametrize("label", edges())
def test_edges(label: str) -> None:
    outputs, expected = (OPERATION.ours(edges()[label], backend) for backend in ("triton", "torch"))
    assert outputs.keys() == expected.keys()
    for name, x in outputs.items():
        assert torch.equal(x, expected[name]), name


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33, 2048, 2049])
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int, dtype: torch.dtype) -> None:
    """Rows of `size` logits, the last of which is the best, and blocks whose last column is written."""
    logits = among_nonsense(torch.arange(size).repeat(3, 1).to(dtype) - 4096)
    positions, draft_tokens = among_nonsense(torch.tensor([4, 5, 6])), among_nonsense(torch.full((3, 5), -1))
    with guarded_outputs():
        topk_p, topk_index = draft_topk1_triton(logits, positions, draft_tokens, 4)
    best = logits[0].argmax().item()
    assert topk_p.tolist() == [[1.0]] * 3
    assert topk_index.tolist() == [[best]] * 3
    assert positions.tolist() == [5, 6, 7]
    assert draft_tokens.tolist() == [[-1, -1, -1, -1, best]] * 3
    for x in (logits, positions, draft_tokens):
        assert_rim_untouched(x)


@needs_interpreter
def test_triton_as_torch() -> None:
    for seed in range(60):
        outputs, expected = (
            OPERATION.ours(OPERATION.draw(random.Random(seed), SMALL), backend) for backend in ("triton", "torch")
        )
        for name, x in outputs.items():
            assert torch.equal(x, expected[name]), name


@both_backends
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", torch.rand(2, 5).double(), r"logits is torch\.float64"),
        ("logits", torch.rand(5, 2).t(), r"logits has strides"),
        ("logits", torch.rand(2, 0), r"vocabulary of logits is 0"),
        ("positions", torch.zeros(3).long(), r"positions has shape"),
        ("positions", torch.zeros(2).int(), r"positions is torch\.int32"),
        ("draft_tokens", torch.zeros(3, 4).long(), r"draft_tokens has shape"),
        ("draft_tokens", torch.zeros(4, 2).long().t(), r"draft_tokens has strides"),
        ("column", 4, r"column is 4, it must be at least 0 and at most 3"),
        ("column", -1, r"column is -1"),
    ],
)
def test_arguments_are_checked_before_anything_is_changed(name: str, value: object, message: str, backend: str) -> None:
    positions, draft_tokens = torch.zeros(2).long(), torch.zeros(2, 4).long()
    arguments = {"logits": torch.rand(2, 5), "positions": positions, "draft_tokens": draft_tokens, "column": 1}
    with pytest.raises(ValueError, match=message):
        draft_topk1(**{**arguments, name: value}, backend=backend)
    assert positions.tolist() == [0, 0]
    assert draft_tokens.tolist() == [[0] * 4] * 2
