"""The cases that kernels are timed and compiled on, how they are timed, and the command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from refspec import kernels
from refspec.bench import compile_report
from refspec.bench import kernels as bench
from refspec.bench.compile_report import Compiled, Refused
from refspec.bench.kernel_cases import CASES, SERVINGS, Case, Serving, kernel_cases, rows_to_read, run_case
from refspec.cli import bench_kernels as command
from refspec.cli.main import app
from refspec.kernels.backend import TRITON_INSTALLED, interpreting
from refspec.oracle.sources import Sources

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "contexts": (3, 9),
    "page_sizes": (1, 4),
    "vocabularies": (50,),
    "layers": 2,
    "hidden": 12,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
TINY_SERVINGS = (Serving(2, 1, 2, 3, **TINY), Serving(2, 2, 2, 4, **TINY))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "layers"):
        yield from tensors_in(list(value.layers))


def test_every_operation_has_cases() -> None:
    assert set(CASES) | {"launches"} == set(kernels.__all__)


@pytest.mark.parametrize("operation", CASES)
def test_cases_are_calls_that_the_operation_takes_and_both_backends_answer_alike(operation: str) -> None:
    """At sizes for the interpreter: there is no other way to know that the large ones, which a GPU runs, are sound."""
    cases = list(kernel_cases(operation, CPU, TINY_SERVINGS))
    assert cases
    for case in cases:
        answers = []
        for backend in ("torch", "triton") if interpreting() else ("torch",):
            copy = deepcopy(case)
            answers.append([*tensors_in(run_case(operation, copy, backend)), *tensors_in(copy.arguments)])
        for one, other in zip(*answers, strict=True) if len(answers) == 2 else ():
            loose = {"rtol": 0.02, "atol": 0.01} if one.dtype in (torch.bfloat16, torch.float16) else {}
            torch.testing.assert_close(one, other, **loose)


@pytest.mark.parametrize("operation", CASES)
def test_bytes_lie_between_what_is_returned_and_all_there_is(operation: str) -> None:
    for case in kernel_cases(operation, CPU, TINY_SERVINGS):
        given = sum(x.nbytes for x in tensors_in(case.arguments))
        returned = sum(x.nbytes for x in tensors_in(run_case(operation, case, "torch")))
        assert 0 < case.bytes <= 2 * given + returned, case.label  # what changes in place goes in and out
        if operation not in (
            "chain_rejection_sampling",
            "tree_sampling_target_only",
        ):  # theirs leaves out what is small
            assert case.bytes >= returned, case.label


def test_bytes_by_hand() -> None:
    """Two requests of 3 and 9 tokens, k = 2, N = 4."""

    def moved(operation: str) -> dict[str, int]:
        cases = kernel_cases(operation, CPU, TINY_SERVINGS[1:])
        return {case.label.removeprefix("b2 k2 S2 N4").strip(): case.bytes for case in cases}

    # Indices, the parents that nodes of the second level hang under, and lengths in; positions and three links out.
    kept = next(kernel_cases("build_tree", CPU, TINY_SERVINGS[1:])).arguments["top_scores_index"].tolist()
    parents = sum(len({index // 2 for index in row if index >= 2}) for row in kept)
    assert 0 < parents < 2 * 3
    tree = 8 * 2 * (3 + 1) + 8 * parents + 8 * 2 * 4 * 4
    assert moved("build_tree") == {
        "full": tree + 4 * (3 + 4) + 4 * (9 + 4),
        "qlen": tree + 2 * 4 * 4,
        "packed": tree + 2 * 4,
    }
    assert moved("stable_topk")["V50"] == 4 * (4 * 50 + (4 + 8) * 2)
    assert moved("tree_sampling_target_only") == dict.fromkeys(("V50", "V50, one coin"), 4 * 2 * 50)
    attended = (3 + 4) + (9 + 4)
    cache, queries = attended * (2 * 2 * 16 * 2 + 8), 2 * 8 * 4 * 16 * 2
    assert moved("tree_attention")["verify bfloat16 dim 16"] == cache + queries + 2 * 4 * 4 + 3 * 8


def test_bytes_by_hand_of_slots_and_rows() -> None:
    """Two requests of 3 and 9 tokens, S = 2; pages of 1 and of 4; bf16 rows of 2 layers, keys and values, 2 x 16."""

    def moved(operation: str, serving: Serving) -> dict[str, int]:
        return {case.label.split(" ", 4)[4]: case.bytes for case in kernel_cases(operation, CPU, (serving,))}

    row = 2 * 2 * 2 * 16 * 2
    # Accepted: 1 and 2 rows. Each moves in and out, and so do its two slots.
    chain, tree = TINY_SERVINGS
    assert moved("move_kv_cache", chain) == {"accepted": 3 * 2 * (row + 8), "all nodes": 6 * 2 * (row + 8)}
    # Step 1 of k = 2: 12 committed slots and 2·2·2 of the branches in; each branch gets its request's, and two more.
    indptr, places = 8 * (4 + 1), 8 * 2 * 2
    indices = 8 * (12 + 8) + 8 * (2 * 12 + 8) + indptr + places
    assert moved("draft_kv_indices", tree) == {"page 1": indices, "page 4": indices}
    # 12 committed slots and 2·N nodes, in and out
    assert moved("paged_kv_indices", chain) == {"verify": 2 * 8 * (12 + 2 * chain.num_draft_tokens) + 2 * 16 + 8 * 3}
    # Contexts of 17 and 79 tokens in pages of 4: tails of 1 and 3, read once, written once for k = 2.
    assert moved("duplicate_prefix_tail", tree) == {"page 4": (1 + 3) * 2 * (row + 8) + places}


@pytest.mark.parametrize(
    ("coins", "classic", "block"),
    [
        ((0.9, 0.9), 2, 2),  # the first falls: p and q there
        ((0.4, 0.9), 2, 4),  # the first stands alone, or in a block: the row after it is weighed, and found too light
        ((0.3, 0.9), 2, 2),  # what is weighed is what is drawn from
        ((0.9, 0.05), 2, 1),  # in a block both stand, and the target's last row is drawn from
        ((0.3, 0.05), 1, 1),
    ],
)
def test_rows_of_chain_rejection_by_hand(coins: tuple[float, float], classic: int, block: int) -> None:
    """h_1 = 1/2 and h_2 = 1/9. After the first draft h·p - q leaves .3, so that the first stands up to .3 / .8."""
    p = torch.tensor([[[0.4, 0.6], [0.8, 0.2], [0.5, 0.5]]])
    q = torch.tensor([[[0.8, 0.2], [0.1, 0.9]]])
    drafts = torch.tensor([[0, 0, 1]])
    assert rows_to_read(drafts, p, q, torch.tensor([coins]), False) == classic
    assert rows_to_read(drafts, p, q, torch.tensor([coins]), True) == block


def test_cases_are_the_same_every_time() -> None:
    one, other = (list(kernel_cases("tree_sampling_target_only", CPU, TINY_SERVINGS)) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert a.label == b.label
        assert all(torch.equal(x, y) for x, y in zip(tensors_in(a.arguments), tensors_in(b.arguments), strict=True))


def test_labels_are_unique() -> None:
    for operation in ("assign_req_to_token", "build_tree", "draft_kv_indices"):
        labels = [case.label for case in kernel_cases(operation, CPU, SERVINGS)]
        assert len(set(labels)) == len(labels)


# --- timing -----------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_repetition_and_the_order_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that slows down by half from one repetition to the next: the times drift, the ratios do not."""
    order: list[str] = []
    monkeypatch.setattr(bench, "run_case", lambda operation, case, backend: order.append(backend))
    monkeypatch.setattr(bench, "sglang_launches", lambda *_: lambda: order.append("sglang"))
    cost = {"copy": 4.0, "triton": 2.0, "torch": 20.0, "sglang": 3.0}
    timed = 0

    def timer(call: bench.Call) -> float:
        nonlocal timed
        call()
        slow = 1.5 ** (timed // 4)
        timed += 1
        return cost[order[-1]] * slow

    case = Case("one", {}, bytes=bench.COPIED)  # half of what a copy moves
    timing, copies = bench.time_case("build_tree", case, timer, lambda: order.append("copy"), Sources({}), 5)
    assert order[4:12] == ["copy", "triton", "torch", "sglang", "triton", "torch", "sglang", "copy"]  # 0 to 3: warm up
    assert copies == [4.0 * 1.5**i for i in range(5)]
    assert timing.torch == pytest.approx((10, 10, 10))
    assert timing.sglang == pytest.approx((1.5, 1.5, 1.5))
    assert timing.bound == pytest.approx((1, 1, 1))
    assert timing.microseconds == pytest.approx(2.0 * 1.5**2 * 1e6)


def test_what_is_timed_is_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real calls, on a CPU: a timer that waits for nothing but them."""

    def timer(call: bench.Call) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    monkeypatch.setattr(bench, "run_case", lambda operation, case, _: run_case(operation, case, "torch"))
    (case,) = kernel_cases("verify_tree_greedy", CPU, TINY_SERVINGS[:1])
    timing, _ = bench.time_case("verify_tree_greedy", case, timer, lambda: torch.zeros(10), Sources({}), 3)
    assert timing.microseconds > 0
    assert timing.sglang is None
    assert timing.sglang_note == "the wheel of SGLang 0.5.23 is not ready: refspec oracle fetch"


# --- the command ------------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kernels", *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so_and_what_works() -> None:
    result = invoke("build_tree")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "no GPU that torch can use" in result.stderr
    assert "--compile-report" in result.stderr


def test_a_wrong_name_gets_one_line_with_the_right_ones() -> None:
    result = invoke("--compile-report", "build_trees")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "'build_trees'" in result.stderr
    assert all(name in result.stderr for name in CASES)


SPILLING = Compiled("build_tree", "build_tree_kernel", ("b1",), "MODE=full", 80, 4, 255, 1024, 32, 0, 16, 24)
GOOD = Compiled("build_tree", "build_tree_kernel", ("b1",), "MODE=full", 90, 4, 80, 1024, 0, 0, 0, 0)
REFUSED = Refused("stable_topk", "b1", 90, "CompilationError: no")


@pytest.mark.parametrize(
    ("found", "explained", "status", "sentence"),
    [
        (([GOOD], []), {}, 0, "sm_90"),
        (([SPILLING, GOOD], []), {}, 1, "build_tree_kernel spills: nothing says why"),
        (([SPILLING, GOOD], []), {"build_tree_kernel": "it is cold"}, 0, "build_tree_kernel spills: it is cold"),
        (([GOOD], [REFUSED]), {}, 1, "refused: stable_topk b1, sm_90: CompilationError: no"),
    ],
)
def test_compile_report_shows_what_is_wrong_and_its_status_says_so(
    found: tuple[list[Compiled], list[Refused]],
    explained: dict[str, str],
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_report, "compile_report", lambda operations, progress: found)
    monkeypatch.setattr(compile_report, "SPILLS_EXPLAINED", explained)
    result = invoke("--compile-report")
    assert result.exit_code == status
    assert sentence in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    narrow = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["bench", "kernels", "--compile-report"]).stdout
    assert "build_tree_kernel MODE=full" in narrow
    assert "sm_90 80" in " ".join(narrow.split()) or "sm_90 255" in " ".join(narrow.split())
    assert "…" not in narrow
    document = json.loads(invoke("--compile-report", "--json").stdout)
    assert [kernel["registers"] for kernel in document["kernels"]] == [kernel.registers for kernel in found[0]]
    assert [failure["error"] for failure in document["refused"]] == [failure.error for failure in found[1]]


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_compile_report_of_one_operation() -> None:
    result = invoke("--compile-report", "--json", "verify_tree_greedy")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert {kernel["kernel"] for kernel in document["kernels"]} == {"verify_tree_greedy_kernel"}
    assert {kernel["target"] for kernel in document["kernels"]} == {80, 90}
    assert {label for kernel in document["kernels"] for label in kernel["cases"]} == {str(s) for s in SERVINGS}


def test_timings_as_they_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = (10.0, 9.0, 11.0)
    timings = [
        bench.Timing("build_tree", "b1 full", 100, 5.25, ratios, (1.5, 1.0, 2.0), "", (3.0, 3.0, 3.0)),
        bench.Timing("compact_to_front", "b1", 100, 7.0, ratios, None, "SGLang has no Triton kernel for it", ratios),
    ]
    command._show_timings(bench.KernelReport("A GPU", "2.11", "3.6", 3.0e12, 30, timings))
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "A GPU, torch 2.11, Triton 3.6; a copy moves 3000 GB/s" in words
    assert "Not timed against SGLang, since SGLang has no Triton kernel for it: compact_to_front." in words
    assert max(map(len, out.splitlines())) <= 80
    line = next(line for line in out.splitlines() if "b1 full" in line)
    assert [cell.strip() for cell in line.split("│")[2:6]] == ["5.2", "10.0", "1.50", "3.00"]
