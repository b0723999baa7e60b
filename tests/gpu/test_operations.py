"""Compiled kernels against the references, on the cases of parity."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch

from refspec import kernels
from refspec.bench.kernel_cases import CASES, SERVINGS, kernel_cases
from refspec.oracle.operation import LARGE, MEDIUM, SMALL, Inputs, Operation, Outputs
from refspec.oracle.opinions import moved


def cases_of(operation: Operation, on_gpu: bool) -> Iterator[tuple[str, Inputs]]:
    """All edges, and random cases of each size; in the interpreter a few small ones."""
    rng = random.Random(0)
    yield from operation.edges().items() if on_gpu else ()
    for size, count in ((SMALL, 40), (MEDIUM, 20), (LARGE, 3)) if on_gpu else ((SMALL, 3),):
        for i in range(count):
            yield f"{size} {i}", operation.draw(rng, size)


def answer(operation: Operation, inputs: Inputs, backend: str, device: torch.device) -> Outputs:
    """On the CPU, whoever gave it."""
    return moved(operation.ours(moved(deepcopy(inputs), device), backend), "cpu")


@pytest.mark.parametrize("name", CASES)
def test_triton_and_reference_on_the_gpu_answer_as_the_reference_on_the_cpu(
    name: str, device: torch.device, on_gpu: bool
) -> None:
    operation: Operation = importlib.import_module(f"refspec.oracle.operations.{name}").OPERATION
    compared = 0
    for label, inputs in cases_of(operation, on_gpu):
        if operation.borderline(inputs):  # a coin on a border: sums of floats decide, and those differ between devices
            continue
        expected = answer(operation, inputs, "torch", torch.device("cpu"))
        for backend in ("torch", "triton"):
            actual = answer(operation, inputs, backend, device)
            assert actual.keys() == expected.keys()
            for key, right in expected.items():
                rtol, atol = operation.tolerances.get(key, (0.0, 0.0))
                torch.testing.assert_close(
                    actual[key],
                    right,
                    rtol=rtol,
                    atol=atol,
                    equal_nan=True,
                    msg=lambda said, at=f"{name}, {label}, {backend}, {key}": f"{at}: {said}",
                )
        compared += 1
    assert compared > 0


@pytest.mark.parametrize("name", CASES)
def test_cases_of_serving_size_run(name: str, device: torch.device, on_gpu: bool) -> None:
    """What `refspec bench kernels` times: no launch of it is refused for want of shared memory or grid."""
    if not on_gpu:
        pytest.skip("too large for the interpreter")
    for case in kernel_cases(name, device, SERVINGS):
        getattr(kernels, name)(**case.arguments, backend="triton")
        torch.cuda.synchronize()


def test_best_token_of_rows_with_nan(device: torch.device) -> None:
    """NaN loses against every number, equal numbers go to the lowest id, NaN alone gives 0."""
    nan, inf = float("nan"), float("inf")
    rows = torch.full((5, 5000), -1.0)
    rows[0, 4321], rows[0, 17] = 5.0, nan
    rows[1] = nan
    rows[2] = -inf
    rows[2, 0] = nan
    rows[3, 4000], rows[3, 3000] = 2.0, 2.0
    rows[4, 1], rows[4, 4999] = nan, inf
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        positions = torch.arange(5, device=device)
        block = torch.zeros(5, 3, dtype=torch.int64, device=device)
        topk_p, topk_index = kernels.draft_topk1(rows.to(device, dtype), positions, block, 1, backend="triton")
        assert topk_index[:, 0].tolist() == [4321, 0, 1, 3000, 4999]
        assert topk_p[:, 0].tolist() == [1.0] * 5
        assert positions.tolist() == [1, 2, 3, 4, 5]
        assert block.tolist() == [[0, token, 0] for token in (4321, 0, 1, 3000, 4999)]
