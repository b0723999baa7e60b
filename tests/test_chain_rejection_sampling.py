"""Rejection along a chain, coin by coin; that the law of it all is right is shown in test_sampler_truth.py."""

from __future__ import annotations

import random

import pytest
import torch
from backends import among_nonsense, both_backends, guarded_outputs, needs_interpreter

from refspec.kernels import chain_rejection_sampling
from refspec.kernels.chain_rejection_sampling import chain_rejection_sampling_triton
from refspec.oracle.operation import SMALL, Size
from refspec.oracle.operations.chain_rejection_sampling import OPERATION, case, edges, in_float64

RULES = pytest.mark.parametrize("block", [False, True])


def one_draft(
    p: list[float], q: list[float], token: int, coin: float, final_coin: float, block: bool, backend: str
) -> tuple[int, int]:
    """One draft, and a flat row after it. Returns how many are accepted, and the drawn token."""
    target = torch.tensor([[p, [1 / len(p)] * len(p)]])
    predict, _, accepted = chain_rejection_sampling(
        torch.tensor([[0, token]]),
        target,
        torch.tensor([[q]]),
        torch.tensor([[coin]]),
        torch.tensor([final_coin]),
        block,
        backend,
    )
    return int(accepted), int(predict[accepted])


@both_backends
@RULES
def test_VER_07_what_is_left_is_divided_by_its_sum(block: bool, backend: str) -> None:
    # p - q leaves .4 0 0: token 0, whatever the coin.
    finals = [0.0, 0.25, 0.5, 0.75, 0.999]
    drawn = [one_draft([0.6, 0.3, 0.1], [0.2, 0.7, 0.1], 1, 0.9, final, block, backend) for final in finals]
    assert drawn == [(0, 0)] * 5
    # It leaves .4 .2 0: the border lies at 2/3.
    finals = [0.0, 0.66, 0.67, 0.999]
    drawn = [one_draft([0.5, 0.3, 0.2], [0.1, 0.1, 0.8], 2, 0.9, final, block, backend) for final in finals]
    assert drawn == [(0, 0), (0, 0), (0, 1), (0, 1)]


@both_backends
@RULES
def test_VER_07_equal_laws_accept_always(block: bool, backend: str) -> None:
    """p == q, with the largest coin there is; rows with zeros; then the drawn token has a probability."""
    for seed in range(3):
        inputs = case(random.Random(seed), 4, 5, 33, "same")
        inputs["coins"].fill_(1 - 2**-24)
        inputs["block_verification"] = block
        outputs = OPERATION.ours(inputs, backend)
        assert outputs["accept_token_num"].tolist() == [5] * 4
        drawn = outputs["predict"].view(4, 6)[:, 5].long()
        assert bool((inputs["target_probs"][:, 5].gather(1, drawn[:, None]) > 0).all())


@both_backends
@RULES
def test_VER_07_nothing_left_draws_from_the_target(block: bool, backend: str) -> None:
    """Rows that rounding left short: q is p and a bit. The draft falls, and nothing of p is left over."""
    p = [0.0, 0.4, 0.6]
    q = [0.0, 0.5, 0.6]
    assert one_draft(p, q, 1, 0.9, 0.3, block, backend) == (0, 1)
    assert one_draft(p, q, 1, 0.9, 0.5, block, backend) == (0, 2)


@both_backends
@RULES
def test_VER_08_the_draft_law_of_a_greedy_draft_is_one_hot(block: bool, backend: str) -> None:
    """p = .5 .5, token 0 drafted always: it is accepted for half of all coins, and otherwise 1 is drawn."""
    for coin in (0.1, 0.49, 0.5, 0.51, 0.9):
        first = one_draft([0.5, 0.5], [1.0, 0.0], 0, coin, 0.7, block, backend)
        assert first == ((1, 1) if coin < 0.5 else (0, 1))
    # With the softmax .9 .1 as q it is accepted up to 5/9: the law would be .556 .444.
    accepted = [one_draft([0.5, 0.5], [0.9, 0.1], 0, coin, 0.7, block, backend)[0] for coin in (0.55, 0.56)]
    assert accepted == [1, 0]


@both_backends
@RULES
def test_VER_22_the_draft_law_belongs_to_its_row(block: bool, backend: str) -> None:
    """Draft = target, three requests with different rows: all is accepted; with rows of the neighbour it is not."""
    inputs = case(random.Random(5), 3, 4, 6, "same")
    inputs["block_verification"] = block
    assert OPERATION.ours(inputs, backend)["accept_token_num"].tolist() == [4, 4, 4]
    wrong_request = {**inputs, "draft_probs": inputs["draft_probs"].roll(1, dims=0)}
    assert OPERATION.ours(wrong_request, backend)["accept_token_num"].tolist() != [4, 4, 4]
    wrong_step = {**inputs, "draft_probs": inputs["draft_probs"].roll(1, dims=1)}
    assert OPERATION.ours(wrong_step, backend)["accept_token_num"].tolist() != [4, 4, 4]


@both_backends
@RULES
def test_VER_04_intervals_are_half_open(block: bool, backend: str) -> None:
    """A token that the target never says is rejected even by the coin 0; a coin on the border is outside."""
    assert one_draft([0.0, 1.0], [0.5, 0.5], 0, 0.0, 0.0, block, backend) == (0, 1)
    assert one_draft([0.25, 0.75], [0.5, 0.5], 0, 0.5, 0.0, block, backend)[0] == 0
    assert one_draft([0.25, 0.75], [0.5, 0.5], 0, 0.4999, 0.0, block, backend)[0] == 1


@both_backends
@RULES
@pytest.mark.parametrize("q", [float("nan"), -0.5, float("inf"), 1.5, 0.0])
def test_what_is_no_probability_cannot_be_accepted(q: float, block: bool, backend: str) -> None:
    """Its token counts as not drafted: rejected, and all of p is left for it."""
    assert one_draft([0.0, 1.0], [0.0, q], 1, 0.1, 0.5, block, backend) == (0, 1)


@both_backends
def test_block_accepts_what_the_classic_rule_rejects(backend: str) -> None:
    """The first draft is unlikely (p/q = 1/2), the second makes up for it (p/q = 2): together they stand."""
    target = torch.tensor([[[0.4, 0.6], [0.8, 0.2], [0.5, 0.5]]])
    draft = torch.tensor([[[0.8, 0.2], [0.4, 0.6]]])
    arguments = (torch.tensor([[0, 0, 0]]), target, draft, torch.tensor([[0.7, 0.7]]), torch.tensor([0.0]))
    assert chain_rejection_sampling(*arguments, False, backend)[2].tolist() == [0]
    assert chain_rejection_sampling(*arguments, True, backend)[2].tolist() == [2]


@both_backends
def test_block_draws_from_what_is_left_after_the_prefix(backend: str) -> None:
    """h_1 = 1/2; in the next row max(h·p - q, 0) leaves .3 for token 0 alone, so one draft stands up to 3/8."""
    target = torch.tensor([[[0.4, 0.6, 0.0], [0.8, 0.1, 0.1], [1.0, 0.0, 0.0]]])
    draft = torch.tensor([[[0.8, 0.2, 0.0], [0.1, 0.5, 0.4]]])
    for coin, accepted in ((0.37, 1), (0.38, 0)):
        predict, accept_index, number = chain_rejection_sampling(
            torch.tensor([[0, 0, 1]]), target, draft, torch.tensor([[coin, 0.9]]), torch.tensor([0.9]), True, backend
        )
        assert number.tolist() == [accepted]
        assert accept_index.tolist() == [[0, 1, -1] if accepted else [0, -1, -1]]
        assert predict.tolist() == ([0, 0, 0] if accepted else [1, 0, 0])


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
        inputs = OPERATION.draw(rng, Size(batch=4, nodes=9))
        expected, border = in_float64(inputs)
        if not border:
            compared += 1
            for name, x in OPERATION.ours(inputs, "torch").items():
                assert torch.equal(x, expected[name]), name
    assert compared > 100


@needs_interpreter
@RULES
@pytest.mark.parametrize("size", [1, 5, 7, 8, 9, 33])
def test_TRI_02_nothing_beside_the_buffers_is_touched(size: int, block: bool) -> None:
    """Rows of `size` probabilities, chains of `size` nodes."""
    inputs = case(random.Random(size), 3, size - 1, size, "near") | {"block_verification": block}
    expected, border = in_float64(inputs)
    assert not border
    guarded = {name: among_nonsense(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    with guarded_outputs():
        outputs = chain_rejection_sampling_triton(**guarded)
    for x, right in zip(outputs, expected.values(), strict=True):
        assert torch.equal(x, right)


@needs_interpreter
def test_triton_as_torch() -> None:
    rng = random.Random(2)
    for _ in range(30):
        inputs = OPERATION.draw(rng, SMALL)
        outputs, expected = (OPERATION.ours(inputs, backend) for backend in ("triton", "torch"))
        for name, x in outputs.items():
            assert torch.equal(x, expected[name]) or OPERATION.borderline(inputs), name


@both_backends
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("candidates", torch.full((2, 3), -1), r"candidates has entries from -1 to -1"),
        ("candidates", torch.zeros(2, 4).long(), r"candidates has shape"),
        ("target_probs", torch.rand(2, 3, 5).half(), r"target_probs is torch\.float16"),
        ("target_probs", torch.rand(2, 0, 5), r"number of columns in target_probs is 0"),
        ("draft_probs", torch.rand(2, 3, 5), r"draft_probs has shape \(2, 3, 5\), it must be \(2, 2, 5\)"),
        ("draft_probs", torch.rand(2, 2, 10)[:, :, ::2], r"draft_probs has strides"),
        ("coins", torch.full((2, 2), -0.1), r"coins has entries outside of \[0, 1\)"),
        ("coins", torch.rand(2, 3), r"coins has shape"),
        ("final_coins", torch.ones(2), r"final_coins has entries outside of \[0, 1\)"),
        ("final_coins", torch.rand(2).double(), r"final_coins is torch\.float64"),
    ],
)
def test_arguments_are_checked_before_a_launch(name: str, value: object, message: str, backend: str) -> None:
    arguments = {
        "candidates": torch.zeros(2, 3).long(),
        "target_probs": torch.rand(2, 3, 5),
        "draft_probs": torch.rand(2, 2, 5),
        "coins": torch.rand(2, 2),
        "final_coins": torch.rand(2),
    }
    with pytest.raises(ValueError, match=message):
        chain_rejection_sampling(**{**arguments, name: value}, backend=backend)


@needs_interpreter
def test_block_sums_no_row_that_nobody_will_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all drafts stand that is every row but the last; where the last draft falls, the last."""
    allocated: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **kind: allocated.append(empty(*size, **kind).fill_(7)) or allocated[-1]
    )
    p = torch.tensor([0.5, 0.5]).expand(2, 4, 2).contiguous()
    coins = torch.tensor([[0.0, 0.0, 0.999], [0.0, 0.0, 0.0]])
    q = torch.stack([torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5])])[:, None].expand(2, 3, 2).contiguous()
    _, _, accepted = chain_rejection_sampling_triton(
        torch.zeros(2, 4, dtype=torch.int64), p, q, coins, torch.zeros(2), block_verification=True
    )
    assert accepted[1] == 3
    (sums,) = (x for x in allocated if x.dim() == 4)
    assert (sums != 7).all(-1).all(-1).tolist() == [[True, True, True, False], [False, False, False, True]]
