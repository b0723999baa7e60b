"""SGLang's kernels, compiled, against ours: `refspec oracle check` on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from refspec.oracle import wheel
from refspec.oracle.check import Cases, Jury, check, module_of, operation_names
from refspec.oracle.opinions import OPINIONS, why_not_for


@pytest.fixture(scope="module")
def jury(on_gpu: bool) -> Iterator[Jury]:
    if not on_gpu:
        pytest.skip("SGLang's kernels are compiled for a GPU alone")
    with Jury(wheel.folders()) as jury:
        yield jury


@pytest.mark.parametrize("name", operation_names())
@pytest.mark.parametrize("opinion", ["sglang-gpu", "sgl_kernel"])
def test_sglang_on_the_gpu_agrees(opinion: str, name: str, jury: Jury) -> None:
    """The edges, 20 small cases, two medium ones; every opinion that this machine can run has a say."""
    cases = Cases(module_of(name), seed=0)
    why = jury.not_here.get(opinion)
    why = why or why_not_for(OPINIONS[opinion], cases.operation, jury.folders, jury.sgl_kernel_functions)
    if why:
        pytest.skip(why)
    report = check(cases, cases.labels(20), jury)
    assert [fault.sentence for fault in (*report.differences, *report.failures)] == []
    assert report.opinions[opinion].answered > 0
