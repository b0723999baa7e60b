"""Where two outputs part, and whether rounding may be the cause."""

from __future__ import annotations

import pytest
import torch
from builders import random_llama, scripted_engine, transparent_pair

from refspec import Engine, SamplingParams, SpecConfig
from refspec.engine.compare import GAP_LIMITS, Difference, first_difference

LOGITS = [1.0, 3.0, 2.75, 0.0]


def differ(plain: list[int], spec: list[int]) -> Difference | None:
    return first_difference(scripted_engine(lambda context: LOGITS, 4, None), [2, 2], plain, spec)


def test_the_same_outputs_do_not_differ() -> None:
    assert differ([1, 1, 1], [1, 1, 1]) is None
    assert differ([], []) is None


@pytest.mark.parametrize(
    ("plain", "spec", "index", "plain_token", "spec_token"),
    [
        ([1, 1, 1], [1, 2, 1], 1, 1, 2),
        ([1, 1, 1], [2, 1, 1], 0, 1, 2),
        ([1, 1, 1], [1, 1], 2, 1, None),
        ([1, 1], [1, 1, 3], 2, None, 3),
        ([], [3], 0, None, 3),
    ],
)
def test_first_difference_and_the_gap_there(
    plain: list[int], spec: list[int], index: int, plain_token: int | None, spec_token: int | None
) -> None:
    difference = differ(plain, spec)
    assert difference is not None
    assert (difference.index, difference.plain_token, difference.spec_token) == (index, plain_token, spec_token)
    assert difference.gap == 0.25


def test_gap_is_that_of_the_text_up_to_there() -> None:
    """The two best logits after the prompt and two tokens, not after one or three."""
    gaps = {3: 0.5, 4: 0.25, 5: 0.125}
    engine = scripted_engine(lambda context: [0, 5, 5 - gaps.get(len(context), 4), 1], 4, None)
    difference = first_difference(engine, [2, 2], [1, 1, 1], [1, 1, 2])
    assert difference is not None
    assert difference.gap == 0.25


@pytest.mark.parametrize(
    ("gap", "plain", "spec", "is_rounding"),
    [
        (1e-4, 1, 2, True),
        (2e-4, 1, 2, True),
        (3e-4, 1, 2, False),
        (1e-4, 1, None, False),  # one output is longer than the other: no rounding does that
        (1e-4, None, 2, False),
    ],
)
def test_rounding_is_believed_only_at_a_near_tie(
    gap: float, plain: int | None, spec: int | None, is_rounding: bool
) -> None:
    assert Difference(5, gap, 2e-4, plain, spec).is_rounding == is_rounding


def test_float64_and_scripted_models_have_no_excuse() -> None:
    """Whether by dtype="float64" or as a float64 model object."""
    assert GAP_LIMITS[torch.float64] == 0
    difference = first_difference(Engine(random_llama(dtype=torch.float64)), [1], [2, 3], [2, 4])
    assert difference is not None
    assert difference.gap_limit == 0
    assert not difference.is_rounding


def test_asking_leaves_the_engine_as_it_was() -> None:
    target, head = transparent_pair()
    engine = Engine(target, head, SpecConfig())
    (before,) = engine.generate([[0, 5]], SamplingParams(max_new_tokens=9))
    told, free = engine.stats.as_dict(), engine.allocator.free_slots.clone()
    first_difference(engine, [0, 5], before.token_ids, before.token_ids[:-1])
    assert engine.stats.as_dict() == told
    assert torch.equal(engine.allocator.free_slots, free)
    assert engine.generate([[0, 5]], SamplingParams(max_new_tokens=9)) == [before]
