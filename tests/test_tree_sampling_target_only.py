"""Sampling down the tree, coin by coin; that the law of it all is right is shown in test_sampler_truth.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter

from refspec.kernels import tree_sampling_target_only
from refspec.kernels.tree_sampling_target_only import tree_sampling_target_only_triton
from refspec.oracle.operation import SMALL, Size
from refspec.oracle.operations.tree_sampling_target_only import OPERATION, case, edges, in_float64


def one_level(
    p: list[float], drafts: list[int], coin: float, final_coin: float = 0.0, backend: str = "torch", **options: Any
) -> tuple[list[int], int]:
    """A root and its children, whose rows are flat. Returns the tokens that come out, and how many were accepted."""
    n = 1 + len(drafts)
    probs = torch.full((1, n, len(p)), 1 / len(p))
    probs[0, 0] = torch.tensor(p)
    predict, accept_index, accepted = tree_sampling_target_only(
        torch.tensor([[0, *drafts]]),
        torch.arange(n)[None],
        torch.tensor([[1] + [-1] * (n - 1)]),
        torch.tensor([[-1, *range(2, n), -1]]),
        probs,
        torch.tensor([[coin] + [0.0] * (n - 1)]),
        torch.tensor([final_coin]),
        num_steps=1,
        backend=backend,
        **options,
    )
    return [int(predict[row]) for row in accept_index[0] if row != -1], int(accepted)


@both_backends
def test_VER_04_intervals_are_half_open(backend: str) -> None:
    p = [0.0, 0.5, 0.3, 0.2]
    assert one_level(p, [0], 0.0, 0.0, backend) == ([1], 0)
    assert one_level(p, [2], 0.3, 0.0, backend)[1] == 0
    assert one_level(p, [2], 0.29, 0.0, backend)[1] == 1
    assert one_level(p, [2, 3], 0.5, 0.0, backend) == ([1], 0)
    assert one_level(p, [2, 3], 0.49, 0.0, backend) == ([3, 0], 1)


@both_backends
def test_VER_06_the_final_draw_has_a_coin_of_its_own(backend: str) -> None:
    """p = .4 .3 .2 .1, token 0 drafted. What is left is .3 .2 .1, and the draw's borders are 1/2 and 5/6."""
    p = [0.4, 0.3, 0.2, 0.1]
    tokens = [one_level(p, [0], 0.99, final, backend)[0] for final in (0.0, 0.49, 0.51, 0.83, 0.84, 0.999)]
    assert tokens == [[1], [1], [2], [2], [3], [3]]
    # The coin that rejected lies in [.4, 1): token 1 is drawn only for the tenth of all coins between .4 and .5.
    shared = [one_level(p, [0], coin, 0.0, backend, reuse_coin=True)[0] for coin in (0.41, 0.49, 0.51, 0.83, 0.84)]
    assert shared == [[1], [1], [2], [2], [3]]


@both_backends
def test_rejected_children_are_not_drawn_again(backend: str) -> None:
    p = [0.25, 0.25, 0.25, 0.25]
    drawn = {one_level(p, [2, 0], 0.5 + i / 40, i / 20, backend)[0][0] for i in range(20)}
    assert drawn == {1, 3}


@both_backends
def test_an_accepted_path_draws_from_the_whole_last_row(backend: str) -> None:
    """The last row's children were not looked at, since all steps are used up: nothing is struck out."""
    links = torch.tensor([[1, 2, -1]]), torch.full((1, 3), -1)
    probs = torch.tensor([[[0.0, 1.0], [0.9, 0.1], [0.5, 0.5]]])
    candidates, index = torch.tensor([[0, 1, 0]]), torch.arange(3)[None]
    predict, accept_index, accepted = tree_sampling_target_only(
        candidates, index, *links, probs, torch.zeros(1, 3), torch.tensor([0.2]), num_steps=1, backend=backend
    )
    assert (predict.tolist(), accept_index.tolist(), accepted.tolist()) == ([1, 0, 0], [[0, 1]], [1])


@both_backends
def test_nothing_left_draws_from_the_row_itself(backend: str) -> None:
    """Both tokens drafted, and a coin that the row's sum, rounded, does not reach."""
    p = [0.0, 0.4999999, 0.4999999, 0.0]
    assert one_level(p, [1, 2], 0.99999994, 0.0, backend) == ([1], 0)
    assert one_level(p, [1, 2], 0.99999994, 0.6, backend) == ([2], 0)


@both_backends
@pytest.mark.parametrize("vocab", [5, 33, 1000, 5000])
def test_a_coin_that_rounding_leaves_without_owner_takes_the_last_token_with_weight(backend: str, vocab: int) -> None:
    """Zeros at the end, the largest coin, and sums that round: never a token of probability 0."""
    p = torch.rand(vocab)
    p[-2:] = 0.0
    tokens, _ = one_level((p / p.sum()).tolist(), [vocab - 1], 0.5, 1 - 2**-24, backend)
    assert p[tokens[0]] > 0
    assert tokens[0] >= vocab - 5


@both_backends
def test_a_row_without_weight_gives_a_token_of_the_vocabulary(backend: str) -> None:
    assert one_level([0.0, 0.0, 0.0], [1], 0.5, 0.5, backend) == ([0], 0)


@both_backends
def test_thresholds(backend: str) -> None:
    p = [0.1, 0.2, 0.3, 0.4]
    assert one_level(p, [1], 0.3, 0.0, backend)[1] == 0
    assert one_level(p, [1], 0.3, 0.0, backend, threshold_acc=0.5)[1] == 1  # 0.3 < 0.2 / 0.5
    assert one_level(p, [1], 0.4, 0.0, backend, threshold_acc=0.5)[1] == 0  # the border, half-open
    assert one_level(p, [1], 0.9, 0.0, backend, threshold_single=0.2)[1] == 1
    assert one_level(p, [1], 0.9, 0.0, backend, threshold_single=0.21)[1] == 0
    assert one_level(p, [0], 0.9, 0.0, backend, threshold_acc=0.0)[1] == 1  # any child that is possible at all


@both_backends
@pytest.mark.parametrize("label", edges())
def test_edges(label: str, backend: str) -> None:
    expected, _ = in_float64(edges()[label])
    for name, x in OPERATION.ours(edges()[label], backend).items():
        assert x.dtype == torch.int32
        assert torch.equal(x, expected[name]), name


def test_as_one_after_the_other_in_float64() -> None:
    rng = random.Random(1)
    compared = 0
    for _ in range(150):
        inputs = OPERATION.draw(rng, Size(batch=4, nodes=12))
        expected, border = in_float64(inputs)
        if not border:
            compared += 1
            for name, x in OPERATION.ours(inputs, "torch").items():
                assert torch.equal(x, expected[name]), name
    assert compared > 100


@needs_interpreter
@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int) -> None:
    """Rows of `size` probabilities, trees of `size` nodes, up to `size` steps."""
    inputs = case(random.Random(size), 3, size, size, num_steps=size)
    expected, border = in_float64(inputs)
    assert not border
    guarded = {name: among_nonsense(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    with guarded_outputs():
        outputs = tree_sampling_target_only_triton(**guarded)
    for x, right in zip(outputs, expected.values(), strict=True):
        assert torch.equal(x, right)


@needs_interpreter
def test_triton_as_torch() -> None:
    rng = random.Random(2)
    for _ in range(40):
        inputs = OPERATION.draw(rng, SMALL)
        outputs, expected = (OPERATION.ours(inputs, backend) for backend in ("triton", "torch"))
        for name, x in outputs.items():
            assert torch.equal(x, expected[name]) or OPERATION.borderline(inputs), name


@both_backends
def test_inputs_are_not_changed(backend: str) -> None:
    inputs = OPERATION.draw(random.Random(3), SMALL)
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    OPERATION.ours(inputs, backend)
    assert all(torch.equal(inputs[name], x) for name, x in before.items())


@both_backends
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("candidates", torch.zeros(2, 3, dtype=torch.int32), r"candidates is torch\.int32"),
        ("candidates", torch.full((2, 3), 5), r"candidates has entries from 5 to 5, .* 0 to 4"),
        ("retrieve_index", torch.full((2, 3), 6), r"retrieve_index has other entries"),
        ("retrieve_next_token", torch.full((2, 3), 3), r"retrieve_next_token has entries"),
        ("retrieve_next_token", torch.zeros(2, 3).long(), r"retrieve_next_token leads back"),
        ("retrieve_next_sibling", torch.full((2, 3), 2), r"retrieve_next_sibling leads back"),
        ("retrieve_next_sibling", torch.zeros(2, 4).long(), r"retrieve_next_sibling has shape"),
        ("target_probs", torch.rand(2, 3, 5).double(), r"target_probs is torch\.float64"),
        ("target_probs", torch.rand(2, 5, 3).transpose(1, 2), r"target_probs has strides"),
        ("target_probs", torch.rand(2, 3, 0), r"vocabulary of target_probs is 0"),
        ("coins", torch.ones(2, 3), r"coins has entries outside of \[0, 1\)"),
        ("final_coins", torch.tensor([0.0, torch.nan]), r"final_coins has entries outside"),
        ("final_coins", torch.zeros(3), r"final_coins has shape"),
        ("num_steps", -1, r"num_steps is -1"),
        ("threshold_acc", 1.5, r"threshold_acc is 1\.5"),
        ("threshold_single", -0.1, r"threshold_single is -0\.1"),
    ],
)
def test_arguments_are_checked_before_a_launch(name: str, value: object, message: str, backend: str) -> None:
    none = torch.full((2, 3), -1)
    arguments = {
        "candidates": torch.zeros(2, 3).long(),
        "retrieve_index": torch.arange(6).view(2, 3),
        "retrieve_next_token": none,
        "retrieve_next_sibling": none,
        "target_probs": torch.rand(2, 3, 5),
        "coins": torch.rand(2, 3),
        "final_coins": torch.rand(2),
        "num_steps": 2,
    }
    with pytest.raises(ValueError, match=message):
        tree_sampling_target_only(**{**arguments, name: value}, backend=backend)
