"""A trace says what happened, survives a file, and is refused when it is not one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import generate_watched, random_logits, scripted_engine
from pydantic import ValidationError

from refspec import SamplingParams, SpecConfig
from refspec.trace import SCHEMA_VERSION, Candidate, Output, Round, Trace, TraceError, TreeRequest

SPEC = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, exact_branch_kv=True)

# The example of the tree's lesson, as a model: what follows each text, with its probability.
SCRIPT = {
    (0,): {1: 1.0},
    (0, 1): {2: 0.6, 3: 0.4},
    (0, 1, 2): {4: 0.9, 5: 0.1},
    (0, 1, 3): {4: 0.8, 5: 0.2},
    (0, 1, 2, 4): {3: 1.0},
}


def script_logits(context: list[int]) -> list[float]:
    chances = SCRIPT.get(tuple(context), {0: 1.0})
    return [math.log(chances.get(token, 1e-30)) for token in range(6)]


def run_of_the_script() -> Round:
    engine = scripted_engine(script_logits, 6, SPEC)
    (generation,), watcher = generate_watched(engine, [[0]], SamplingParams(max_new_tokens=4))
    assert generation.token_ids == [1, 2, 4, 3]
    (round_,) = watcher.rounds
    return round_


def a_trace() -> Trace:
    engine = scripted_engine(random_logits(6), 6, SPEC)
    prompts = [[1, 2, 3], [4]]
    generations, watcher = generate_watched(engine, prompts, SamplingParams(max_new_tokens=9))
    return Trace(
        config={"topk": 2, "algorithm": "eagle", "temperature": 0.5, "exact_branch_kv": True, "draft": None},
        vocabulary={token: chr(97 + token) for token in range(6)},
        rounds=watcher.rounds,
        outputs=[
            Output(prompt_ids=p, token_ids=g.token_ids, finish_reason=g.finish_reason, accept_lens=g.accept_lens)
            for p, g in zip(prompts, generations, strict=True)
        ],
    )


def test_round_of_the_script_is_as_worked_out_by_hand() -> None:
    """A .6, B .4; under A: C .9, D .1; under B: E .8, F .2. The target takes A and C, and adds its own."""
    round_ = run_of_the_script()
    (request,) = round_.requests
    assert [(c.token, c.parent) for c in request.candidates] == [(2, -1), (3, -1), (4, 0), (5, 0), (4, 1), (5, 1)]
    assert [c.score for c in request.candidates] == pytest.approx([0.6, 0.4, 0.54, 0.06, 0.32, 0.08], rel=1e-6)
    expected: dict[str, Any] = {
        "request": 0,
        "seq_len": 1,
        "bonus_token": 1,
        "kept": [0, 1, 2],
        "parents": [-1, 0, 0, 1],
        "positions": [1, 2, 2, 3],
        "tree_mask": ["1000", "1100", "1010", "1101"],
        "target_predict": [2, 4, 4, 3],
        "accepted_rows": [0, 1, 3],
        "committed": [2, 4, 3],
        "finish_reason": "length",
        "draft_slots": [[2, 3], [4, 5]],
        "verify_slots": [2, 3, 4, 5],  # the draft's were back by then
        "kept_slots": [2, 3, 5],
    }
    assert request.model_dump(exclude={"candidates"}) == expected
    assert round_.model_dump(exclude={"requests"}) == {
        "number": 0,
        "slots_taken": {"draft": 4, "verify": 4},
        "slots_returned": {"draft": 4, "commit": 1},
        "forwards": {"target": 1, "draft": 1},
        "launches": {"build_tree": 1, "verify_tree_greedy": 1, "assign_req_to_token": 1, "stable_topk": 4},
    }


def test_trace_of_a_run_agrees_with_itself() -> None:
    """Who reads only the trace can tell the whole story: trees from candidates, outputs from rounds."""
    trace = a_trace()
    committed: dict[int, list[int]] = {0: [], 1: []}
    for round_ in trace.rounds:
        for request in round_.requests:
            pool = request.candidates
            tokens = [request.bonus_token, *(pool[i].token for i in request.kept)]
            columns = {-1: 0, **{i: c for c, i in enumerate(request.kept, start=1)}}
            assert request.parents == [-1, *(columns[pool[i].parent] for i in request.kept)]
            for parent, child in zip(request.accepted_rows, request.accepted_rows[1:], strict=False):
                assert request.parents[child] == parent
                assert request.target_predict[parent] == tokens[child]
            says = [request.target_predict[row] for row in request.accepted_rows]
            assert request.committed == says[: len(request.committed)]
            committed[request.request] += request.committed
            for row, mask in enumerate(request.tree_mask):
                depth = mask.count("1") - 1
                assert request.positions[row] == request.seq_len + depth
                assert mask[row] == "1"
    for r, output in enumerate(trace.outputs):
        assert output.token_ids[1:] == committed[r]
        assert sum(output.accept_lens) == len(committed[r])


def test_a_trace_that_is_saved_is_read_back(tmp_path: Path) -> None:
    trace = a_trace()
    trace.save(tmp_path / "run.json")
    assert Trace.load(tmp_path / "run.json") == trace


def test_ids_and_text_of_any_kind_survive(tmp_path: Path) -> None:
    trace = a_trace().model_copy(update={"vocabulary": {0: "é", 1: '"\n', 1023: "\ufffd☃"}})
    trace.save(tmp_path / "run.json")
    assert Trace.load(tmp_path / "run.json").vocabulary == {0: "é", 1: '"\n', 1023: "\ufffd☃"}


def changed(change: Callable[[dict[str, Any]], None]) -> str:
    document = a_trace().model_dump(mode="json")
    change(document)
    return json.dumps(document)


DAMAGES: dict[str, tuple[Callable[[], str], str]] = {
    "nothing in it": (lambda: "", "the document"),
    "cut short": (lambda: a_trace().model_dump_json()[:500], "the document"),
    "other JSON": (lambda: "[1, 2]", "the document"),
    "a field is missing": (lambda: changed(lambda d: d.pop("outputs")), "outputs"),
    "a field too many": (lambda: changed(lambda d: d.update(colour="red")), "colour"),
    "a number is a word": (lambda: changed(lambda d: d["rounds"][0].update(number="first")), r"rounds\.0\.number"),
    "deep inside": (
        lambda: changed(lambda d: d["rounds"][1]["requests"][0]["candidates"][2].pop("score")),
        r"rounds\.1\.requests\.0\.candidates\.2\.score",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_with_the_place(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    content, place = DAMAGES[damage]
    file.write_text(content())
    with pytest.raises(TraceError, match=place) as error:
        Trace.load(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
def test_trace_of_another_version_is_refused(version: int, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(changed(lambda d: d.update(schema_version=version)))
    with pytest.raises(TraceError, match=f"version {version}, this refspec reads {SCHEMA_VERSION}"):
        Trace.load(file)


def test_trace_of_another_version_says_so_even_when_its_fields_are_others(tmp_path: Path) -> None:
    """A new version is there because fields have changed: complaining of the fields would hide the cause."""
    file = tmp_path / "run.json"
    file.write_text(changed(lambda d: d.update(schema_version=SCHEMA_VERSION + 1, samplers=[])))
    with pytest.raises(TraceError, match=f"version {SCHEMA_VERSION + 1}, this refspec reads {SCHEMA_VERSION}"):
        Trace.load(file)


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_file_that_cannot_be_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    if kind == "folder":
        file.mkdir()
    elif kind == "binary":
        file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot read the trace") as error:
        Trace.load(file)
    assert str(file) in str(error.value)


def test_events_do_not_change_after_the_fact() -> None:
    with pytest.raises(ValidationError):
        run_of_the_script().number = 7  # type: ignore[misc]


def test_schema_describes_every_field() -> None:
    schema = Trace.model_json_schema()
    definitions = schema["$defs"]
    for event in (Round, TreeRequest, Candidate, Output):
        assert set(definitions[event.__name__]["properties"]) == set(event.model_fields)
        assert definitions[event.__name__]["additionalProperties"] is False
    assert set(schema["properties"]) == {"schema_version", "config", "vocabulary", "rounds", "outputs"}
