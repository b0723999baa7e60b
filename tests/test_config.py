"""Every knob is checked when it is set; the message names the field and the numbers."""

from __future__ import annotations

import pytest
from builders import candidates_of

from refspec import SamplingParams, SpecConfig


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"algorithm": "medusa"}, r"algorithm is 'medusa', it must be one of: eagle"),
        ({"algorithm": None}, r"algorithm is None"),
        ({"topk": 0}, r"topk must be at least 1, got 0"),
        ({"topk": -2}, r"topk must be at least 1, got -2"),
        ({"topk": 2.0}, r"topk must be a whole number, got 2\.0"),
        ({"topk": "4"}, r"topk must be a whole number, got '4'"),
        ({"topk": True}, r"topk must be a whole number, got True"),
        ({"topk": None}, r"topk must be a whole number, got None"),
        ({"num_steps": 0}, r"num_steps must be at least 1, got 0"),
        ({"num_steps": -1}, r"num_steps must be at least 1, got -1"),
        ({"num_steps": 1.5}, r"num_steps must be a whole number, got 1\.5"),
        ({"num_draft_tokens": 1}, r"num_draft_tokens must be at least 2, got 1"),
        ({"num_draft_tokens": 0}, r"num_draft_tokens must be at least 2, got 0"),
        ({"num_draft_tokens": 513, "topk": 16}, r"num_draft_tokens must be at most 512, got 513"),
        ({"num_draft_tokens": 513, "algorithm": "ngram"}, r"num_draft_tokens must be at most 512, got 513"),
        ({"num_steps": 512, "topk": 1, "num_draft_tokens": 2}, r"num_steps must be at most 511, got 512"),
        ({"num_draft_tokens": "8"}, r"num_draft_tokens must be a whole number, got '8'"),
        ({"page_size": 0}, r"page_size must be at least 1, got 0"),
        ({"page_size": 2.0}, r"page_size must be a whole number, got 2\.0"),
        ({"exact_branch_kv": "no"}, r"exact_branch_kv must be True or False, got 'no'"),
        ({"exact_penalties": 1}, r"exact_penalties must be True or False, got 1"),
        ({"sampler": "gumbel"}, r"sampler is 'gumbel', it must be one of: target_only, rejection, block"),
        ({"sampler": None}, r"sampler is None"),
        ({"threshold_single": -0.1}, r"threshold_single must be from 0 to 1, got -0\.1"),
        ({"threshold_single": 1.5}, r"threshold_single must be from 0 to 1, got 1\.5"),
        ({"threshold_acc": float("nan")}, r"threshold_acc must be from 0 to 1, got nan"),
        ({"threshold_acc": "1"}, r"threshold_acc must be a number, got '1'"),
        ({"threshold_acc": True}, r"threshold_acc must be a number, got True"),
    ],
    ids=str,
)
def test_spec_config_refuses(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        SpecConfig(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("sampler", ["rejection", "block"])
@pytest.mark.parametrize(("k", "steps", "n"), [(2, 3, 4), (4, 3, 16), (1, 3, 3), (1, 1, 2)])
def test_a_drawn_chain_is_a_chain_and_verified_whole(sampler: str, k: int, steps: int, n: int) -> None:
    settings = {"topk": k, "num_steps": steps, "num_draft_tokens": n}
    assert not SpecConfig(**settings).drafts_are_drawn  # type: ignore[arg-type]
    if (k, n) == (1, steps + 1):
        assert SpecConfig(**settings, sampler=sampler).drafts_are_drawn  # type: ignore[arg-type]
        return
    with pytest.raises(
        ValueError, match=f"sampler is '{sampler}'.* needs topk=1 and num_draft_tokens=num_steps\\+1"
    ) as no:
        SpecConfig(**settings, sampler=sampler)  # type: ignore[arg-type]
    assert f"got topk={k}, num_steps={steps}, num_draft_tokens={n}" in str(no.value)


@pytest.mark.parametrize("name", ["threshold_single", "threshold_acc"])
def test_a_drawn_chain_has_no_thresholds(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0.9, but sampler is 'block': only target_only has thresholds"):
        SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, sampler="block", **{name: 0.9})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topk", "steps", "candidates"), [(1, 3, 3), (2, 3, 10), (4, 2, 20), (2, 1, 2), (8, 5, 264), (4, 3, 36), (1, 1, 1)]
)
def test_TREE_03_candidates_bound_the_tree(topk: int, steps: int, candidates: int) -> None:
    """As many nodes as candidates and the root; one more is refused, with the numbers."""
    assert SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=candidates + 1).num_candidates == candidates
    with pytest.raises(ValueError, match=f"num_draft_tokens is {candidates + 2}") as refusal:
        SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=candidates + 2)
    for part in (f"topk={topk}", f"num_steps={steps}", f"{candidates} candidates", f"at most {candidates + 1}"):
        assert part in str(refusal.value)


@pytest.mark.parametrize("topk", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("steps", range(1, 7))
def test_TREE_03_candidates_are_counted_level_by_level(topk: int, steps: int) -> None:
    assert SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=2).num_candidates == candidates_of(topk, steps)


def test_PAGE_01_where_the_drafts_slots_end() -> None:
    """Page 4, length 10, two branches of 3: each takes the partial page and one more, up to 24, 14 slots on."""
    spec = SpecConfig(topk=2, num_steps=3, num_draft_tokens=7, page_size=4)
    assert spec.draft_end(10) == 24
    assert [spec.draft_end(length) for length in (8, 9, 11)] == [16, 16, 24]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 40])
def test_where_a_rounds_slots_end(length: int) -> None:
    """With pages of one token, and with one branch, k·S behind the committed ones; the tree's N in any case."""
    for topk, page_size in ((4, 1), (1, 1), (1, 16)):
        spec = SpecConfig(topk=topk, num_steps=3, num_draft_tokens=4, page_size=page_size)
        assert spec.draft_end(length) == length + topk * 3
        assert spec.tree_end(length) == length + 4


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": -5}, r"max_new_tokens must be at least 1, got -5"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens must be a whole number, got 2\.5"),
        ({"max_new_tokens": None}, r"max_new_tokens must be a whole number, got None"),
        ({"stop_token_ids": (3, -1)}, r"stop_token_ids must be at least 0, got -1"),
        ({"stop_token_ids": ["</s>"]}, r"stop_token_ids must be a whole number, got '</s>'"),
        ({"stop_token_ids": 5}, r"stop_token_ids"),
        ({"stop": ""}, r"a stop string is empty"),
        ({"stop": ("a", "")}, r"a stop string is empty"),
        ({"stop": None}, r"stop must be a text, or a list of texts, got None"),
        ({"stop": 5}, r"stop must be a text, or a list of texts, got 5"),
        ({"stop": ["a", 5]}, r"stop must be a text, or a list of texts, got \['a', 5\]"),
        ({"stop": b"ab"}, r"stop must be a text, or a list of texts, got b'ab'"),
        ({"stop": "a\ufffd"}, r"'a\\ufffd' holds characters that are no text"),
        ({"stop": "\ud800"}, r"'\\ud800' holds characters that are no text"),
        ({"temperature": -0.5}, r"temperature must be at least 0, got -0\.5"),
        ({"temperature": float("nan")}, r"temperature must be at least 0, got nan"),
        ({"temperature": float("inf")}, r"temperature is inf"),
        ({"temperature": 10**400}, r"temperature is inf, it must be a finite number"),
        ({"temperature": "hot"}, r"temperature must be a number, got 'hot'"),
        ({"temperature": None}, r"temperature must be a number, got None"),
        ({"top_k": -1}, r"top_k must be at least 0, got -1"),
        ({"top_k": 2.0}, r"top_k must be a whole number, got 2\.0"),
        ({"top_p": 0}, r"top_p is 0, .* above 0"),
        ({"top_p": 1.01}, r"top_p must be from 0 to 1, got 1\.01"),
        ({"top_p": float("nan")}, r"top_p must be from 0 to 1, got nan"),
        ({"min_p": -0.1}, r"min_p must be from 0 to 1, got -0\.1"),
        ({"min_p": 2}, r"min_p must be from 0 to 1, got 2"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be from 0\.01 to 2, got 0"),
        ({"repetition_penalty": -1.0}, r"repetition_penalty must be from 0\.01 to 2, got -1\.0"),
        ({"repetition_penalty": 2.5}, r"repetition_penalty must be from 0\.01 to 2, got 2\.5"),
        ({"repetition_penalty": None}, r"repetition_penalty must be a number, got None"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be from -2 to 2, got -2\.1"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty must be from -2 to 2, got nan"),
        ({"presence_penalty": 3}, r"presence_penalty must be from -2 to 2, got 3"),
        ({"presence_penalty": "1"}, r"presence_penalty must be a number, got '1'"),
        ({"logit_bias": None}, r"logit_bias must map token ids to numbers, got None"),
        ({"logit_bias": [(1, 2)]}, r"logit_bias must map token ids to numbers, got \[\(1, 2\)\]"),
        ({"logit_bias": {"1": 2.0}}, r"an id of logit_bias must be a whole number, got '1'"),
        ({"logit_bias": {-1: 2.0}}, r"an id of logit_bias must be at least 0, got -1"),
        ({"logit_bias": {1: "2"}}, r"logit_bias of id 1 must be a number, got '2'"),
        ({"logit_bias": {1: float("-inf")}}, r"logit_bias of id 1 must be from -100 to 100, got -inf"),
        ({"grammar": "{}"}, r"grammar is '\{\}', it must have a method matcher\(\), or be None"),
        ({"logprobs": -1}, r"logprobs must be at least 0, got -1"),
        ({"logprobs": True}, r"logprobs must be a whole number, got True"),
        ({"seed": -1}, r"seed must be at least 0, got -1"),
        ({"seed": 1.0}, r"seed must be a whole number, got 1\.0"),
        ({"seed": 2**63}, r"seed is 9223372036854775808, it must be below"),
        ({"ignore_eos": "false"}, r"ignore_eos must be True or False, got 'false'"),
        ({"include_stop_str_in_output": 1}, r"include_stop_str_in_output must be True or False, got 1"),
    ],
    ids=str,
)
def test_sampling_params_refuse(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        SamplingParams(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_stop_tokens_may_come_as_any_sequence() -> None:
    assert SamplingParams(stop_token_ids=[3, 1]).stop_token_ids == (3, 1)  # type: ignore[arg-type]


def test_stop_strings_may_come_as_one_or_as_any_sequence() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["b", "a?"]).stop == ("b", "a?")  # type: ignore[arg-type]
    assert SamplingParams(stop=(text for text in ("\n", "é"))).stop == ("\n", "é")  # type: ignore[arg-type]
    assert SamplingParams().stop == ()


def test_biases_are_the_params_own() -> None:
    given = {3: 1.0}
    params = SamplingParams(logit_bias=given)
    given[3] = float("nan")
    assert params.logit_bias == {3: 1.0}
    assert params == SamplingParams(logit_bias={3: 1.0}) != SamplingParams()
    assert len({params, SamplingParams(logit_bias={3: 1.0})}) == 1


@pytest.mark.parametrize("knobs", [SpecConfig(), SamplingParams()], ids=lambda k: type(k).__name__)
def test_knobs_cannot_be_turned_after_the_check(knobs: object) -> None:
    with pytest.raises(AttributeError):
        knobs.topk = 0  # type: ignore[attr-defined]
