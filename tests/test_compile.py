"""Every kernel compiles for sm_80 and sm_90, here, without a GPU; none spills but those that say why."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from refspec import kernels
from refspec.bench import compile_report as report
from refspec.bench.compile_report import TARGETS, Compiled, Refused, compile_report
from refspec.bench.kernel_cases import CASES
from refspec.kernels.backend import TRITON_INSTALLED

pytestmark = pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")


@pytest.fixture(scope="module")
def compiled() -> tuple[list[Compiled], list[Refused]]:
    return compile_report(list(CASES))


def test_the_compiler_takes_every_case(compiled: tuple[list[Compiled], list[Refused]]) -> None:
    assert compiled[1] == []


@pytest.mark.parametrize("target", TARGETS)
def test_every_operation_has_kernels_for_the_target(
    compiled: tuple[list[Compiled], list[Refused]], target: int
) -> None:
    assert {kernel.operation for kernel in compiled[0] if kernel.target == target} == set(CASES)
    assert all(kernel.registers > 0 for kernel in compiled[0])


def test_every_kernel_that_is_launched_is_compiled(compiled: tuple[list[Compiled], list[Refused]]) -> None:
    launched = {name for file in Path(kernels.__file__).parent.glob("*.py") for name in launches_in(file.read_text())}
    assert len(launched) > len(CASES)
    assert launched == {kernel.kernel for kernel in compiled[0]}


def launches_in(source: str) -> list[str]:
    """The kernels that are launched, by the names that the report gives them."""
    return [name.strip("_") for name in re.findall(r"\b(_\w+_kernel)\[", source)]


def test_none_spills_without_a_reason(compiled: tuple[list[Compiled], list[Refused]]) -> None:
    assert [kernel for kernel in compiled[0] if kernel.spills and not kernel.explanation] == []


def test_a_reason_is_there_only_for_kernels_that_spill(compiled: tuple[list[Compiled], list[Refused]]) -> None:
    assert set(report.SPILLS_EXPLAINED) <= {kernel.kernel for kernel in compiled[0] if kernel.spills}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children in which three operations launch faulty kernels."""
    setup = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import faulty_kernels
from refspec.bench import compile_report
faults = {{"draft_topk1": "ends_early", "links_from_mask": "spills", "stable_topk": "is_refused"}}
compile_report.run_case = lambda operation, *_: getattr(faulty_kernels, faults[operation])()
compile_report.serve([int(a) for a in sys.argv[1:]])
"""
    monkeypatch.setattr(report, "_CHILD", setup)


@pytest.mark.usefixtures("faulty")
def test_faults_are_found() -> None:
    """What the tests above look for would be seen."""
    found, refused = compile_report(["links_from_mask", "stable_topk"], targets=[80], processes=1)
    assert {kernel.operation for kernel in found} == {"links_from_mask"}
    assert all(kernel.spills and kernel.spill_stores > 0 and not kernel.explanation for kernel in found)
    assert {failure.operation for failure in refused} == {"stable_topk"}
    assert all("arange's range must be a power of 2" in failure.error for failure in refused)


@pytest.mark.usefixtures("faulty")
def test_a_compiler_that_ends_early_is_told() -> None:
    with pytest.raises(ChildProcessError, match=r"compiles draft_topk1 ended with status 3: out of registers"):
        compile_report(["draft_topk1"])


def test_a_learners_files_in_the_current_folder_are_none_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a learner wrote this')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found, _ = compile_report(["links_from_mask"], targets=[80])
    assert found


def test_without_cuobjdump_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> str:
        raise ValueError("Triton's package has no cuobjdump")

    monkeypatch.setattr(report, "_cuobjdump", lost)
    with pytest.raises(ValueError, match="no cuobjdump"):
        compile_report(["stable_topk"])


def test_without_triton_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.backend, "TRITON_INSTALLED", False)
    with pytest.raises(ValueError, match="Triton is not installed"):
        compile_report(["stable_topk"])
