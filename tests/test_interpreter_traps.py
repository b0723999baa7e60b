"""Where Triton's interpreter and a GPU part ways: each trap is shown, and then its cure.

Every parity result that was won in the interpreter rests on knowing these. A test here fails if Triton changes its
ways; then the rule that rests on it (in the comment beside it) can be looked at again. What the compiler makes of the
same kernels is read from its own output, which needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refspec.kernels.backend import TRITON_INSTALLED, interpreting

if not TRITON_INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not interpreting():
    pytest.skip("Triton compiles in this process: set TRITON_INTERPRET=1", allow_module_level=True)

import trap_kernels as kernels
import triton.language as tl
from triton.runtime.errors import InterpreterError

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, str]]:
    """What trap_kernels.py prints: for each of its launches the compiler's forms "ttir" and "ptx"."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, str(TESTS / "trap_kernels.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def line_with(word: str, forms: dict[str, str]) -> str:
    """The first line of the compiler's own form that has the word in it."""
    return next(line for line in forms["ttir"].splitlines() if word in line)


def summed(x: torch.Tensor, out_dtype: torch.dtype, to: tl.dtype, n: int | None = None) -> float:
    out = torch.zeros(1, dtype=out_dtype)
    kernels.sum_kernel[(1,)](x, out, len(x) if n is None else n, BLOCK=len(x), TO=to)
    return out.item()


# --- bfloat16: the interpreter, which has numpy's types, holds the bits as integers. Rule: load, then cast to f32 -----


def test_bf16_sum_adds_bits_as_integers_unless_cast_first() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    assert summed(x, torch.bfloat16, tl.bfloat16) == pytest.approx(5.9e-39, rel=0.01)
    assert summed(x, torch.bfloat16, tl.float32) == 10.0
    assert summed(x.half(), torch.float16, tl.float16) == 10.0  # numpy has this type


def test_bf16_addition_does_so_too() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    kernels.double_kernel[(1,)](x, out, BLOCK=4, TO=tl.bfloat16)
    assert not torch.isclose(out, 2 * x).any()
    kernels.double_kernel[(1,)](x, out, BLOCK=4, TO=tl.float32)
    assert torch.equal(out, 2 * x)


def test_bf16_sum_when_compiled_stays_in_bf16(compiled: dict[str, dict[str, str]]) -> None:
    """Right, but with 8 bits: 256 + 1 is 256. The cast cures this as well."""
    assert ": bf16" in line_with("arith.addf", compiled["half sum"])


# --- 32 bits. Rule: a sum, product or offset that can pass 2^31 is i64 before it is formed ----------------------------


def test_TRI_05_a_sum_past_2_31_raises_in_the_interpreter() -> None:
    """64 lengths of 2^27."""
    lens = torch.full((64,), 2**27, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="out of bounds for int32"):
        summed(lens, torch.int64, tl.int32)
    assert summed(lens, torch.int64, tl.int64) == 8589934592


def test_TRI_05_and_when_compiled_it_is_32_bits_wide_and_wraps(compiled: dict[str, dict[str, str]]) -> None:
    assert ": i32" in line_with("tt.reduce.return", compiled["sum"])
    assert ": i64" in line_with("tt.reduce.return", compiled["sum cured"])


def test_TRI_05_a_product_past_2_31_wraps_even_in_the_interpreter() -> None:
    """The mask offset of the 64th of 64 requests with 64 tokens and a context of 1,000,000: no error, a negative
    offset."""
    out = torch.zeros(1, dtype=torch.int64)
    kernels.mask_offset_kernel[(1,)](out, 64, 1_000_000, CURED=False)
    assert out.item() == 64 * 64 * 1_000_000 - 2**32 < 0
    kernels.mask_offset_kernel[(1,)](out, 64, 1_000_000, CURED=True)
    assert out.item() == 64 * 64 * 1_000_000


def test_TRI_05_and_when_compiled_it_is_a_32_bit_product(compiled: dict[str, dict[str, str]]) -> None:
    assert "mul.lo.s32" in compiled["mask offset"]["ptx"]
    assert "mul.lo.s64" in compiled["mask offset cured"]["ptx"]
    assert "mul.lo.s32" not in compiled["mask offset cured"]["ptx"]


# --- tl.dot of f32. Rule: input_precision="ieee" where f32 goes in ----------------------------------------------------


def test_fp32_dot_is_tf32_when_compiled_unless_it_asks_for_ieee(compiled: dict[str, dict[str, str]]) -> None:
    assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in compiled["dot"]["ptx"]
    assert "tf32" not in compiled["dot cured"]["ptx"]
    assert "fma.rn.f32" in compiled["dot cured"]["ptx"]


def test_fp32_dot_in_the_interpreter_is_exact_either_way() -> None:
    """1 + 2^-12 needs 12 bits of fraction; TF32 has 10, so on a GPU the product below would be 1."""
    a, b = torch.eye(32) * (1 + 2.0**-12), torch.eye(32)
    for cured in (False, True):
        out = torch.zeros(32, 32)
        kernels.dot_kernel[(1,)](a, b, out, SIZE=32, CURED=cured)
        assert torch.equal(out, a)


# --- i1. Rule: cast a mask to i32 before counting it ------------------------------------------------------------------


def test_adding_i1_is_an_or_in_the_interpreter_and_loses_the_carry_when_compiled(
    compiled: dict[str, dict[str, str]],
) -> None:
    """Triton's issue 10919: true + true is 1 here, 0 on a GPU, and never 2."""

    def twice(cured: bool) -> list[int]:
        out = torch.zeros(2, dtype=torch.int32)
        kernels.twice_kernel[(1,)](torch.tensor([0, 1], dtype=torch.int32), out, BLOCK=2, CURED=cured)
        return out.tolist()

    assert twice(cured=False) == [0, 1]
    assert twice(cured=True) == [0, 2]
    assert "xi1>" in line_with("arith.addi", compiled["twice"])
    assert "xi32>" in line_with("arith.addi", compiled["twice cured"])


def test_cumsum_of_i1_counts_in_the_interpreter_and_when_compiled(compiled: dict[str, dict[str, str]]) -> None:
    """Until Triton's pull request 6927 (2025-05) the compiled scan stayed in i1, and did not count. Now both widen to
    i32, so the rule costs nothing, and guards against older versions."""
    for cured in (False, True):
        out = torch.zeros(8, dtype=torch.int32)
        kernels.count_kernel[(1,)](torch.ones(8, dtype=torch.int32), out, BLOCK=8, CURED=cured)
        assert out.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ": i32" in line_with("tt.scan.return", compiled["count"])
    assert ": i32" in line_with("tt.scan.return", compiled["count cured"])


# --- masks and loops: faults of some versions that this one must not have ---------------------------------------------


def test_TRI_01_a_masked_load_fills_with_what_was_asked_for() -> None:
    assert summed(torch.ones(8), torch.float32, tl.float32, n=5) == 5.0


@pytest.mark.parametrize(("bound", "counts"), [(0, [0, 0, 0]), (1, [1, 1, 1]), (3, [3, 3, 9])])
def test_TRI_07_loops_run_as_often_as_their_bound_says_and_not_at_all_for_0(bound: int, counts: list[int]) -> None:
    out = torch.full((3,), -7)
    kernels.loops_kernel[(1,)](out, bound)
    assert out.tolist() == counts


# --- order. Rule: no program writes what another one reads or writes, unless atomically -------------------------------


def test_the_interpreter_runs_programs_one_by_one_and_so_hides_a_race() -> None:
    """Shifting x in place by one block: each program reads the block that the next one overwrites. On a GPU programs
    run at the same time and in no order; here program 0 is done before 1 begins, so the answer is right every time.
    Nothing but reading the kernel finds this. The same race the other way about shows."""
    x = torch.arange(24)
    kernels.shift_kernel[(3,)](x, x, 24, BLOCK=8)
    assert x.tolist() == [*range(8, 24), *[0] * 8]  # right, by luck

    x = torch.arange(24)
    kernels.shift_back_kernel[(3,)](x, x, 24, BLOCK=8)
    assert x.tolist() == [*range(8)] * 3  # wrong: each block was read after it had been overwritten

    x = torch.arange(24)
    out = x.clone()  # the cure: source and target apart
    kernels.shift_back_kernel[(3,)](x, out, 24, BLOCK=8)
    assert out.tolist() == [*range(8), *range(16)]
