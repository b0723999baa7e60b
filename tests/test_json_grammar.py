"""Outputs that are JSON of a schema, with the shipped models' tokens: valid, complete, the same with speculation."""

from __future__ import annotations

import json
import sys
from functools import reduce
from typing import Any

import pytest
import torch
from builders import assert_all_free, assert_same_output, byte_tokenizer

from refspec import Engine, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel
from refspec.requests.json_grammar import JsonGrammar

CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
PROMPTS = ["def fib(n):", "import json\nx = ", '"""Return the', "class A:\n"]
POINT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "at": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "at"],
    "additionalProperties": False,
}
DEEP: dict[str, Any] = reduce(lambda inner, _: {"items": inner}, range(5000), {})


def is_a_point(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and list(value) == ["name", "at"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and all(type(item) is int for item in value["at"])
    )


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine("tiny", dtype="float64")


@pytest.mark.parametrize("spec", [CHAIN, SpecConfig(), SpecConfig(topk=8, num_steps=5, num_draft_tokens=48)], ids=str)
def test_speculation_writes_the_same_json(spec: SpecConfig, plain: Engine) -> None:
    engine = Engine("tiny", spec=spec, dtype="float64")
    params = SamplingParams(max_new_tokens=150, grammar=engine.json_grammar(POINT), logit_bias={93: 0.5}, logprobs=0)
    free = SamplingParams(max_new_tokens=40)
    outputs = engine.generate([*PROMPTS, PROMPTS[0]], [*[params] * 4, free])
    assert_same_output(plain.generate([*PROMPTS, PROMPTS[0]], [*[params] * 4, free]), outputs)
    for output in outputs[:4]:
        assert (output.finish_reason, output.matched_stop) == ("stop", None)
        assert is_a_point(json.loads(output.text))
        assert len(output.logprobs or []) == len(output.token_ids) == 1 + sum(output.accept_lens)
    assert outputs[4].finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize("sampler", ["target_only", "rejection", "block"])
def test_sampled_json_is_json(sampler: str) -> None:
    engine = Engine("tiny", spec=SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, sampler=sampler))
    grammar = engine.json_grammar(POINT)
    params = [
        SamplingParams(max_new_tokens=200, temperature=1.0, seed=seed, grammar=grammar, logit_bias={93: 2.0})
        for seed in range(16)
    ]
    outputs = engine.generate(["x = "] * 16, params)
    assert len({output.text for output in outputs}) > 8
    for output in outputs:
        assert output.finish_reason == "stop"
        assert is_a_point(json.loads(output.text))
    assert engine.stats.accept_length > 1


def test_what_could_go_on_ends_with_the_end_of_text(plain: Engine) -> None:
    """A number is complete, and could be longer: the model decides, by the only id that is not JSON."""
    engine = Engine("tiny", spec=CHAIN, dtype="float64")
    (eos,) = engine.target_model.config.eos_token_ids
    params = SamplingParams(
        max_new_tokens=30, grammar=engine.json_grammar({"type": "integer", "minimum": 1}), logit_bias={eos: 100.0}
    )
    outputs = engine.generate(PROMPTS, params)
    assert_same_output(plain.generate(PROMPTS, params), outputs)
    for output in outputs:
        assert isinstance(json.loads(output.text), int)
        assert output.token_ids[-1] == eos
        assert (output.finish_reason, output.matched_stop) == ("stop", eos)
    (output,) = engine.generate(PROMPTS[:1], SamplingParams(**{**vars(params), "ignore_eos": True}))
    assert output.token_ids == outputs[0].token_ids
    assert (output.finish_reason, output.matched_stop) == ("stop", None)


def test_an_empty_schema_is_any_json(plain: Engine) -> None:
    for output in plain.generate(PROMPTS, SamplingParams(max_new_tokens=200, grammar=plain.json_grammar({}))):
        if output.finish_reason == "stop":
            json.loads(output.text)
        else:
            assert output.text[0] in '"[{-0123456789tfn'


def test_a_budget_cuts_json_like_any_text(plain: Engine) -> None:
    params = SamplingParams(max_new_tokens=4, grammar=plain.json_grammar(POINT))
    (output,) = plain.generate(PROMPTS[:1], params)
    assert output.finish_reason == "length"
    assert '{"name":"'.startswith(output.text[:9])


def test_matchers_of_one_grammar_are_apart_and_go_back_as_they_came() -> None:
    grammar = JsonGrammar({"enum": ["ab", "ac"]}, byte_tokenizer(), 256, [0])
    one, other = grammar.matcher(), grammar.matcher()

    def allowed(matcher: Any) -> bytes:
        row = torch.zeros(256, dtype=torch.bool)
        matcher.allow(row)
        return bytes(row.nonzero().flatten().tolist())

    seen = []
    for byte in b'"ac"':
        seen.append(allowed(one))
        assert not one.finished
        assert one.accept(byte)
    assert seen == [b'"', b"a", b"bc", b'"']
    assert one.finished
    for back in (1, 2):
        one.rollback(back)
        assert not one.finished
    assert allowed(one) == b"a"
    assert allowed(other) == b'"'
    assert not other.accept(b"x"[0])


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "nonsense"}, "cannot be followed with this tokenizer: Invalid type: nonsense"),
        ({"$ref": "#/nowhere"}, "cannot be followed with this tokenizer: "),
        ({"not": {}}, "cannot be followed with this tokenizer: "),
        ({"const": float}, "cannot be followed with this tokenizer: "),
        (5, "cannot be followed with this tokenizer: "),
        (DEEP, "cannot be followed with this tokenizer: "),
    ],
    ids=lambda value: "deep" if value is DEEP else str(value),
)
def test_schemas_that_cannot_be_followed(schema: Any, complaint: str, plain: Engine) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        plain.json_grammar(schema)
    assert "\n" not in str(refusal.value)


def test_what_else_is_missing(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="this target has no tokenizer"):
        Engine(ScriptedModel(lambda _: [1.0, 0.0], 2)).json_grammar({})
    with pytest.raises(ValueError, match="this model names no end-of-text id"):
        JsonGrammar({}, byte_tokenizer(), 256, [])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="the package llguidance, which is not installed") as refusal:
        plain.json_grammar({})
    assert "\n" not in str(refusal.value)


def test_a_schema_that_nests_without_end_is_refused(plain: Engine) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(ValueError, match="cannot be followed with this tokenizer: ") as refusal:
        plain.json_grammar(endless)
    assert "\n" not in str(refusal.value)
