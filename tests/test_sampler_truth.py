"""Whatever is drafted, the tokens that come out have the target's law: chi-square tests on a vocabulary of 5.

The target is a Markov chain, so that the law of the first two tokens after a root can be written down. A round that
commits one token is followed by a plain draw for the second. For each sampler the same test also rejects a sampler
that is known to be wrong, on as many rows: it would not pass just anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from backends import needs_interpreter
from torch import Tensor

from refspec.kernels import chain_rejection_sampling, tree_sampling_target_only

ROWS = 100_000
VOCAB = 5
ROOT = 2

# From one token to the next. Rows are far from each other, so that a token drawn from the wrong row is seen.
TARGET = torch.tensor(
    [
        [0.40, 0.30, 0.20, 0.10, 0.00],
        [0.05, 0.05, 0.10, 0.20, 0.60],
        [0.35, 0.15, 0.25, 0.05, 0.20],
        [0.00, 0.70, 0.10, 0.10, 0.10],
        [0.20, 0.20, 0.20, 0.20, 0.20],
    ]
)
DRAFT = torch.tensor(
    [
        [0.10, 0.60, 0.10, 0.10, 0.10],
        [0.20, 0.20, 0.20, 0.10, 0.30],
        [0.50, 0.05, 0.05, 0.30, 0.10],
        [0.30, 0.30, 0.10, 0.20, 0.10],
        [0.05, 0.15, 0.60, 0.10, 0.10],
    ]
)


def plausibility(counts: Tensor, law: Tensor) -> float:
    """How probable a chi-square at least as large as this one is, if `law` is the law."""
    possible = law > 0
    if bool(counts[~possible].any()):
        return 0.0
    expected = law[possible].double() * counts.sum()
    assert float(expected.min()) > 5, "too few rows for a chi-square"
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((possible.sum().double() - 1) / 2, chi_square / 2))


def plausibilities(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Plausibility of the first tokens, and of the pairs."""
    of_first = TARGET[ROOT]
    of_pairs = (of_first[:, None] * TARGET).flatten()
    pairs = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB)
    return plausibility(torch.bincount(first, minlength=VOCAB), of_first), plausibility(pairs, of_pairs)


def first_two(predict: Tensor, accept_index: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The first two tokens of each row; where the round committed but one, the second is drawn plainly."""
    first = predict[accept_index[:, 0].long()].long()
    second = predict[accept_index[:, 1].long()].long()  # -1 where there is none: any entry, not used
    plain = torch.multinomial(TARGET[first], 1).squeeze(1)
    return first, torch.where(accepted > 0, second, plain)


def test_the_plain_target_passes_and_a_slightly_bent_one_does_not() -> None:
    first = torch.multinomial(TARGET[ROOT], ROWS, replacement=True)
    second = torch.multinomial(TARGET[first], 1).squeeze(1)
    assert min(plausibilities(first, second)) > 1e-3
    bent = TARGET[ROOT] + torch.tensor([0.01, -0.01, 0.0, 0.0, 0.0])
    assert plausibilities(torch.multinomial(bent, ROWS, replacement=True), second)[0] < 1e-9


@dataclass(frozen=True)
class Shape:
    """parents: of each column after the root, in columns, ascending."""

    name: str
    parents: Sequence[int]
    num_steps: int

    @property
    def nodes(self) -> int:
        return len(self.parents) + 1

    def children(self, column: int) -> list[int]:
        return [child + 1 for child, parent in enumerate(self.parents) if parent == column]


SHAPES = [
    Shape("k=1 S=1 N=2", [0], 1),
    Shape("k=1 S=3 N=4", [0, 1, 2], 3),
    Shape("k=2 S=2 N=7, all there is", [0, 0, 1, 1, 2, 2], 2),
    Shape("k=2 S=2 N=5", [0, 0, 1, 1], 2),
    Shape("k=3 S=3 N=8, leaves on every level", [0, 0, 0, 2, 2, 3, 5], 3),
    Shape("every token is a child", [0, 0, 0, 0, 0, 1], 2),
    Shape("more levels than steps", [0, 0, 1, 3], 1),
]
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def tree_round(shape: Shape, rows: int, backend: str, reuse_coin: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """A round in which each row drafts tokens of its own, siblings without repetition."""
    candidates = torch.full((rows, shape.nodes), ROOT)
    links = torch.full((2, shape.nodes), -1)
    for column in range(shape.nodes):
        if children := shape.children(column):
            candidates[:, children] = torch.multinomial(DRAFT[candidates[:, column]], len(children))
            links[0, column] = children[0]
            links[1, children[:-1]] = torch.tensor(children[1:], dtype=torch.int64)
    first_child, next_sibling = (link.repeat(rows, 1) for link in links)
    return tree_sampling_target_only(
        candidates,
        torch.arange(rows * shape.nodes).view(rows, shape.nodes),
        first_child,
        next_sibling,
        TARGET[candidates],
        torch.rand(rows, shape.nodes),
        torch.rand(rows),
        shape.num_steps,
        reuse_coin=reuse_coin,
        backend=backend,
    )


def chain_round(steps: int, rows: int, backend: str, block: bool, wrong_q: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """A round in which each row's drafts are drawn from DRAFT. wrong_q: how the q given differs from that law."""
    candidates = torch.full((rows, steps + 1), ROOT)
    for i in range(steps):
        candidates[:, i + 1] = torch.multinomial(DRAFT[candidates[:, i]], 1).squeeze(1)
    q = DRAFT[candidates[:, :-1]]
    if wrong_q == "of the next row":
        q = q.roll(1, dims=0)
    elif wrong_q == "of another temperature":
        q = (q.log() / 0.8).softmax(-1)
    return chain_rejection_sampling(
        candidates, TARGET[candidates], q, torch.rand(rows, steps), torch.rand(rows), block, backend
    )


@EACH_SHAPE
def test_tree_sampling_has_the_law_of_the_target(shape: Shape) -> None:
    assert min(plausibilities(*first_two(*tree_round(shape, ROWS, "torch")))) > 1e-3


@EACH_SHAPE
def test_VER_06_the_rejection_coin_used_again_has_not(shape: Shape) -> None:
    reused = plausibilities(*first_two(*tree_round(shape, ROWS, "torch", reuse_coin=True)))
    if shape.name == "every token is a child":  # nothing is ever drawn at the root: only at the nodes below it
        assert reused[0] > 1e-3
        assert reused[1] < 1e-9
    else:
        assert max(reused) < 1e-9


@pytest.mark.parametrize(("reuse_coin", "law"), [(False, [0.4, 0.3, 0.2, 0.1]), (True, [0.4, 0.1, 1 / 3, 1 / 6])])
def test_VER_06_by_its_numbers(reuse_coin: bool, law: list[float]) -> None:
    """p = .4 .3 .2 .1, token 0 drafted. The rate of acceptance is right either way."""
    links = torch.tensor([1, -1]).repeat(ROWS, 1), torch.full((ROWS, 2), -1)
    predict, _, accepted = tree_sampling_target_only(
        torch.zeros(ROWS, 2, dtype=torch.int64),
        torch.arange(2 * ROWS).view(ROWS, 2),
        *links,
        torch.tensor([0.4, 0.3, 0.2, 0.1]).repeat(ROWS, 2, 1),
        torch.rand(ROWS, 2),
        torch.rand(ROWS),
        num_steps=1,
        reuse_coin=reuse_coin,
    )
    assert float(accepted.float().mean()) == pytest.approx(0.4, abs=0.006)
    assert plausibility(torch.bincount(predict[::2].long(), minlength=4), torch.tensor(law)) > 1e-3


RULES = pytest.mark.parametrize("block", [False, True], ids=["classic", "block"])


@RULES
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_chain_rejection_has_the_law_of_the_target(steps: int, block: bool) -> None:
    assert min(plausibilities(*first_two(*chain_round(steps, ROWS, "torch", block)))) > 1e-3


@RULES
@pytest.mark.parametrize("wrong_q", ["of the next row", "of another temperature"])
def test_VER_22_a_q_that_was_not_drawn_from_has_not(wrong_q: str, block: bool) -> None:
    """Of pairs: all rows have the same root, so that the next row's q is wrong from the second token on."""
    assert plausibilities(*first_two(*chain_round(3, ROWS, "torch", block, wrong_q)))[1] < 1e-9


@RULES
@pytest.mark.parametrize(("q", "law"), [([1.0, 0.0], [0.5, 0.5]), ([0.9, 0.1], [0.5 / 0.9, 0.4 / 0.9])])
def test_VER_08_by_its_numbers(q: list[float], law: list[float], block: bool) -> None:
    """p = .5 .5, token 0 drafted always: with the one-hot q the law is right, with the softmax it is .556 .444."""
    predict, _, _ = chain_rejection_sampling(
        torch.zeros(ROWS, 2, dtype=torch.int64),
        torch.tensor([0.5, 0.5]).repeat(ROWS, 2, 1),
        torch.tensor(q).repeat(ROWS, 1, 1),
        torch.rand(ROWS, 1),
        torch.rand(ROWS),
        block,
    )
    assert plausibility(torch.bincount(predict[::2].long(), minlength=2), torch.tensor(law)) > 1e-3


def test_block_verification_accepts_more() -> None:
    classic, block = (chain_round(5, ROWS, "torch", rule)[2].float() for rule in (False, True))
    assert float(block.mean()) > float(classic.mean()) + 0.02


@needs_interpreter
@EACH_SHAPE
def test_the_tree_kernel_gives_the_same_rows(shape: Shape) -> None:
    for reuse_coin in (False, True):
        torch.manual_seed(1)
        expected = tree_round(shape, 12, "torch", reuse_coin)
        torch.manual_seed(1)
        for x, y in zip(tree_round(shape, 12, "triton", reuse_coin), expected, strict=True):
            assert torch.equal(x, y)


@needs_interpreter
@RULES
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_the_chain_kernel_gives_the_same_rows(steps: int, block: bool) -> None:
    torch.manual_seed(1)
    expected = chain_round(steps, 12, "torch", block)
    torch.manual_seed(1)
    for x, y in zip(chain_round(steps, 12, "triton", block), expected, strict=True):
        assert torch.equal(x, y)
