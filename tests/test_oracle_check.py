"""Parity itself, on made-up operations: what is wrong is found, what dies is reported, what did not run is no pass."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from refspec.oracle import check as parity
from refspec.oracle import process
from refspec.oracle.check import Cases, Jury, OperationReport, check, first_difference, module_of, operation_names
from refspec.oracle.operation import Operation
from refspec.oracle.opinions import OPINIONS, versions_named, why_not_for, why_not_here
from refspec.oracle.process import Child, OpinionError, packed
from refspec.oracle.sources import Sources

pytest.importorskip("triton")

# y is x + 1. What a test wants otherwise it says below.
SOUND = """
import os, signal, sys, time
import torch
from refspec.oracle.operation import Operation

def draw(rng, size):
    return {"x": torch.tensor([rng.randint(2, 9) for _ in range(rng.randint(1, size.batch))]), "z": torch.rand(2)}

def edges():
    return {"one zero": {"x": torch.tensor([0])}, "it's one": {"x": torch.tensor([1])}}

def torch_answer(x): return {"y": x + 1}
def triton_answer(x): return {"y": x + 1}
def sglang_answer(x): return {"y": x + 1}
def ours(inputs, backend): return (torch_answer if backend == "torch" else triton_answer)(inputs["x"])
def sglang(sources, inputs): return sglang_answer(inputs["x"])
more = {}
"""
OPERATION = """
OPERATION = Operation("made_up", draw, edges, ours, sglang, "made_up.py:plus_one @1.0", **more)
"""
RAN = ["torch", "triton-interpret", "sglang-interpret"]
Describe = Callable[..., str]
numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the made-up operations are imported from, here and in the children."""
    folder = tmp_path_factory.mktemp("operations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def jury(folder: Path) -> Iterator[Jury]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)  # the same jury everywhere
        jury = Jury({"1.0": folder}, jobs=1)
    with jury:
        yield jury


@pytest.fixture
def describe(folder: Path) -> Describe:
    """The name of a module whose OPERATION is sound but for the code given."""

    def describe(code: str = "") -> str:
        name = f"made_up_{next(numbers)}"
        (folder / f"{name}.py").write_text(SOUND + code + OPERATION)
        sys.path_importer_cache.clear()
        return name

    return describe


def report_on(module: str, jury: Jury, *labels: str, cases: int = 3) -> OperationReport:
    drawn = Cases(module, seed=5)
    return check(drawn, labels or drawn.labels(cases), jury)


# --- cases ------------------------------------------------------------------------------------------------------------


def test_edges_come_first_and_large_cases_only_in_a_thorough_check(describe: Describe) -> None:
    cases = Cases(describe(), seed=0)
    assert cases.labels(2) == ["one zero", "it's one", "small-0", "small-1", "medium-0", "medium-1"]
    assert len(cases.labels()) == 2 + 100 + 2
    thorough = cases.labels(2000)
    assert len(thorough) == 2 + 2000 + 2 + 20
    assert thorough[-1] == "large-19"


def test_a_case_follows_from_seed_and_label_alone(describe: Describe) -> None:
    module = describe()
    first, again, other = Cases(module, 1), Cases(module, 1), Cases(module, 2)
    labels = first.labels(20)
    state = torch.get_rng_state()
    drawn = {label: first.inputs(label) for label in labels}
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    for label in reversed(labels):
        inputs = again.inputs(label)
        assert inputs.keys() == drawn[label].keys()
        assert all(torch.equal(inputs[name], drawn[label][name]) for name in inputs)
    assert any(not torch.equal(other.inputs(label)["z"], drawn[label]["z"]) for label in labels[2:])
    assert len({tuple(drawn[label]["z"].tolist()) for label in labels[2:]}) == len(labels) - 2


@pytest.mark.parametrize("label", ["", "small", "small-", "small--1", "tiny-0", "one"])
def test_a_label_that_names_no_case(label: str, describe: Describe) -> None:
    with pytest.raises(ValueError, match=r"made_up has no case .*; it has 'one zero', \"it's one\", 'small-0', "):
        Cases(describe(), 0).inputs(label)


def test_an_operation_that_is_not_there() -> None:
    assert "assign_req_to_token" in operation_names()
    assert module_of("assign_req_to_token") == "refspec.oracle.operations.assign_req_to_token"
    with pytest.raises(ValueError, match=r"there is no operation 'no_such'; .* assign_req_to_token"):
        module_of("no_such")


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_opinions_that_agree(jury: Jury, describe: Describe) -> None:
    report = report_on(describe(), jury)
    assert report.ok
    assert (report.operation, report.cases, report.seed) == ("made_up", 7, 5)
    assert list(report.opinions) == RAN
    assert all((count.answered, count.failed, count.not_asked) == (7, 0, 0) for count in report.opinions.values())
    assert report.not_run == dict.fromkeys(("triton-gpu", "sglang-gpu", "sgl_kernel"), "no GPU that torch can use")


@pytest.mark.parametrize("wrong", RAN)
def test_one_wrong_value_is_found_in_whoever_gives_it(wrong: str, jury: Jury, describe: Describe) -> None:
    code = wrong.split("-")[0]
    module = describe(f"def {code}_answer(x): return {{'y': torch.where(x == 1, 7, x + 1)}}")
    report = report_on(module, jury)
    assert not report.ok
    assert report.differing_cases == 1
    assert {opinion for d in report.differences for opinion in d.opinions} == set(RAN)
    assert all(wrong in d.opinions for d in report.differences)
    assert len(report.differences) == 2
    found = report.differences[0]
    assert (found.case, found.output, found.place) == ("it's one", "y", (0,))
    assert sorted(found.values) == ["2", "7"]
    assert found.reproduce == """refspec oracle check made_up --seed 5 --case 'it'"'"'s one'"""
    assert [d.sentence for d in report_on(module, jury, "it's one").differences] == [
        d.sentence for d in report.differences
    ]
    assert report_on(module, jury, "one zero").ok


@pytest.mark.parametrize(
    ("code", "output", "values"),
    [
        ("def sglang_answer(x): return {'y': (x + 1).int()}", "y", ("torch.int64 (1,)", "torch.int32 (1,)")),
        ("def sglang_answer(x): return {'y': (x + 1)[None]}", "y", ("torch.int64 (1,)", "torch.int64 (1, 1)")),
        ("def sglang_answer(x): return {'v': x}", "names of the outputs", ("y", "v")),
        ("def sglang_answer(x): return {}", "names of the outputs", ("y", "none")),
    ],
)
def test_another_form(code: str, output: str, values: tuple[str, str], jury: Jury, describe: Describe) -> None:
    report = report_on(describe(code), jury, "one zero")
    assert [(d.output, d.place, d.values) for d in report.differences if d.opinions[0] == "torch"] == [
        (output, None, values)
    ]


def test_sglang_may_answer_in_part_and_we_may_not() -> None:
    operation = Operation("made_up", lambda *_: {}, dict, lambda *_: {})
    x, y = torch.tensor([1]), torch.tensor([2])
    assert first_difference(operation, ("torch", "sglang-gpu"), ({"x": x, "y": y}, {"x": x})) is None
    assert first_difference(operation, ("torch", "sgl_kernel"), ({"x": x, "y": y}, {"y": x})) is not None
    assert first_difference(operation, ("torch", "triton-gpu"), ({"x": x, "y": y}, {"x": x})) is not None


def test_tolerances_and_nan() -> None:
    operation = Operation("made_up", lambda *_: {}, dict, lambda *_: {}, tolerances={"loose": (1e-3, 1e-6)})
    nan = float("nan")

    def differ(output: str, a: list[float], b: list[float], dtype: torch.dtype = torch.float32) -> object:
        answers = {output: torch.tensor(a, dtype=dtype)}, {output: torch.tensor(b, dtype=dtype)}
        return first_difference(operation, ("torch", "triton-gpu"), answers)

    assert differ("loose", [1.0, nan, 0.0], [1.0005, nan, 1e-7]) is None
    assert differ("loose", [1.0, 1.0], [1.0, 1.01]) == ("loose", (1,), ("1.0", str(torch.tensor(1.01).item())))
    assert differ("loose", [nan], [1.0]) == ("loose", (0,), ("nan", "1.0"))
    assert differ("loose", [float("inf")], [float("-inf")]) is not None
    assert differ("strict", [nan, 1.0], [nan, 1.0]) is None
    assert differ("strict", [1.0], [1.0000001]) is not None
    assert differ("loose", [1.0], [1.0005], torch.bfloat16) is None


def test_borderline_values_are_counted_apart_and_borderline_shapes_are_not(jury: Jury, describe: Describe) -> None:
    border = "more['borderline'] = lambda inputs: 1 in inputs['x']\n"
    report = report_on(describe(border + "def sglang_answer(x): return {'y': torch.where(x == 1, 7, x + 1)}"), jury)
    assert report.ok
    assert (report.borderline_cases, report.differing_borderline_cases, report.differing_cases) == (1, 1, 0)
    assert [d.opinions for d in report.borderline_differences] == [
        ("torch", "sglang-interpret"),
        ("triton-interpret", "sglang-interpret"),
    ]
    report = report_on(describe(border + "def sglang_answer(x): return {'y': (x + 1).int()}"), jury, "it's one")
    assert (report.ok, report.borderline_cases, report.differing_cases) == (False, 1, 1)


def test_what_sglang_does_not_take_is_not_asked_of_it(jury: Jury, describe: Describe) -> None:
    report = report_on(describe("more['sglang_takes'] = lambda inputs: 1 not in inputs['x']"), jury)
    assert report.ok
    assert {name: (c.answered, c.not_asked) for name, c in report.opinions.items()} == {
        "torch": (7, 0),
        "triton-interpret": (7, 0),
        "sglang-interpret": (6, 1),
    }


def test_what_one_opinion_does_to_its_inputs_does_not_reach_another(jury: Jury, describe: Describe) -> None:
    code = "\n".join(f"def {name}_answer(x): return {{'y': x.add_(1)}}" for name in ("torch", "triton", "sglang"))
    assert report_on(describe(code), jury).ok


def test_fewer_than_two_opinions_are_no_parity(folder: Path, describe: Describe) -> None:
    report = OperationReport("made_up", "", 0, cases=5, opinions={"torch": parity.Count(answered=5)})
    assert not report.ok


# --- processes --------------------------------------------------------------------------------------------------------


def test_each_opinion_runs_in_its_own_mode(jury: Jury, describe: Describe) -> None:
    code = """
def modes(x):
    import triton
    return {"y": torch.tensor([triton.knobs.runtime.interpret, os.environ.get("TRITON_INTERPRET") == "1"])}
torch_answer = triton_answer = sglang_answer = modes
"""
    report = report_on(describe(code), jury, "one zero")
    assert {(d.opinions, d.values) for d in report.differences} == {
        (("torch", "triton-interpret"), ("False", "True")),
        (("torch", "sglang-interpret"), ("False", "True")),
    }


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process ended by SIGSEGV"),
        ("print('the last words', file=sys.stderr, flush=True); os._exit(3)", "ended with status 3: the last words"),
        ("raise ValueError('no\\nsuch slot')", "ValueError: no such slot (made_up_"),
        ("time.sleep(600)", "no answer within 2 seconds"),
    ],
)
def test_an_opinion_that_fails_fails_on_that_case_alone(
    code: str, why: str, jury: Jury, describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in code:
        monkeypatch.setattr(process, "ANSWER_SECONDS", 2)
    module = describe(f"def triton_answer(x):\n    if 1 in x: {code}\n    return {{'y': x + 1}}")
    report = report_on(module, jury)
    assert not report.ok
    (failure,) = report.failures
    assert (failure.case, failure.opinion) == ("it's one", "triton-interpret")
    assert why in failure.why
    assert "\n" not in failure.why
    assert "--seed 5" in failure.reproduce
    counts = {name: (count.answered, count.failed) for name, count in report.opinions.items()}
    assert counts == {"torch": (7, 0), "triton-interpret": (6, 1), "sglang-interpret": (7, 0)}
    assert report.differences == []


def test_the_cause_of_an_error_within_a_kernel_is_named(jury: Jury, describe: Describe) -> None:
    code = """
def triton_answer(x):
    try: [][1]
    except IndexError as error: raise RuntimeError("InterpreterError(...)") from error
"""
    (failure,) = report_on(describe(code), jury, "one zero").failures
    assert failure.why.startswith("IndexError: list index out of range (made_up_")


def test_what_an_opinion_prints_does_not_get_among_its_answers(jury: Jury, describe: Describe) -> None:
    code = "def torch_answer(x): print('x' * 99); os.write(1, b'y' * 99); return {'y': x + 1}"
    assert report_on(describe(code), jury).ok


def test_several_teams_give_the_same_report(jury: Jury, describe: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    module = describe("def triton_answer(x): return {'y': torch.where(x > 6, 0, x + 1)}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    alone = report_on(module, jury, cases=12)
    assert len(Jury(jury.folders, jobs=2).teams) == 2  # whose processes would be started now
    with Jury(jury.folders, jobs=1) as other:
        monkeypatch.setattr(jury, "teams", [*jury.teams, *other.teams])
        monkeypatch.setattr(jury, "jobs", 2)
        assert report_on(module, jury, cases=12) == alone


def test_an_interruption_ends_all_processes_at_once(
    jury: Jury, describe: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def sglang_answer(x):\n    if 1 in x: time.sleep(600)\n    return {'y': x + 1}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    drawn = Cases(describe(code), 0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with Jury(jury.folders, jobs=1) as other:
        processes = [child._process for child in other.teams[0].values()]
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            check(drawn, drawn.labels(3), other, interrupt)
        assert time.monotonic() - started < 60
        assert all(process is not None and process.wait(timeout=30) < 0 for process in processes)
        with pytest.raises(OpinionError, match=r"stopped|ended by SIGKILL"):
            other.teams[0]["torch"].ask("any", b"")


def test_a_killed_check_leaves_no_process_at_work(describe: Describe, tmp_path: Path) -> None:
    mark = tmp_path / "at work"
    module = describe(f"""
def torch_answer(x):
    with open({str(mark)!r}, "w") as file: file.write(str(os.getpid()))
    while True: pass
""")
    code = f"""
from refspec.oracle.check import Cases, packed
from refspec.oracle.process import Child, OPINIONS
Child(OPINIONS["torch"], {{}}).ask({module!r}, packed({{"x": 1}}))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: mark.exists() and mark.read_text().isdecimal())
    child = psutil.Process(int(mark.read_text()))
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_opinion_that_does_not_load_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sgl_kernel.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child(OPINIONS["sgl_kernel"], {})
    child.launch()
    # Without a GPU, that comes first.
    with pytest.raises(OpinionError, match="libcuda.so.1: cannot open" if torch.cuda.is_available() else "Error: "):
        child.await_ready()
    child.close()


def test_messages_hold_tensors_and_plain_values_alone() -> None:
    with pytest.raises(Exception, match="weights_only"):
        process.unpacked(packed({"x": os.system}))
    assert process.unpacked(packed({"x": [1, None, "a", 0.5, (True, torch.float32)]})) == {
        "x": [1, None, "a", 0.5, (True, torch.float32)]
    }


# --- who can answer ---------------------------------------------------------------------------------------------------


def test_who_cannot_answer_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    reasons = {name: why_not_here(opinion) for name, opinion in OPINIONS.items()}
    assert {name: reason for name, reason in reasons.items() if reason} == {"sgl_kernel": "sgl_kernel is not installed"}
    monkeypatch.setattr("refspec.oracle.opinions.TRITON_INSTALLED", False)
    assert (
        why_not_here(OPINIONS["triton-interpret"]) == why_not_here(OPINIONS["sglang-gpu"]) == "Triton is not installed"
    )
    assert why_not_here(OPINIONS["torch"]) is None


def test_who_has_no_say_about_an_operation() -> None:
    ours_alone = Operation("made_up", lambda *_: {}, dict, lambda *_: {})
    assert why_not_for(OPINIONS["torch"], ours_alone, []) is None
    assert why_not_for(OPINIONS["triton-gpu"], ours_alone, []) is None
    assert why_not_for(OPINIONS["sglang-interpret"], ours_alone, []) == "SGLang has no Triton kernel for it"
    assert why_not_for(OPINIONS["sgl_kernel"], ours_alone, [], ["f"]) == "not compared with sgl_kernel"
    in_cuda = Operation(
        "made_up", lambda *_: {}, dict, lambda *_: {}, sgl_kernel=lambda *_: {}, sgl_kernel_function="f"
    )
    assert why_not_for(OPINIONS["sgl_kernel"], in_cuda, [], ["f"]) is None
    assert why_not_for(OPINIONS["sgl_kernel"], in_cuda, [], ["g"]) == "the installed sgl_kernel has no f"
    source = "a.py:f @0.5.23, b.py:g @0.4.6"
    both = Operation("made_up", lambda *_: {}, dict, lambda *_: {}, lambda *_: {}, source)
    assert versions_named(source) == ["0.4.6", "0.5.23"]
    assert why_not_for(OPINIONS["sglang-gpu"], both, ["0.4.6", "0.5.23"]) is None
    assert why_not_for(OPINIONS["sglang-gpu"], both, ["0.5.23"]) == (
        "the wheel of SGLang 0.4.6 is not ready: refspec oracle fetch"
    )


def test_sources_of_a_wheel_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SGLang 0\.4\.6 is not ready: refspec oracle fetch"):
        Sources({"0.5.23": tmp_path}).jit_functions("any.py", "0.4.6")
    with pytest.raises(FileNotFoundError):
        Sources({"0.5.23": tmp_path}).module("any.py")
