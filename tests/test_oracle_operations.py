"""How other people's code is called: its functions get what their signatures ask for, on the inputs' own device."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from backends import both_backends
from torch import Tensor
from torch.overrides import TorchFunctionMode

from refspec.kernels import build_tree, links_from_mask, tree_sampling_target_only, verify_tree_greedy
from refspec.oracle.check import module_of, operation_names
from refspec.oracle.operation import SMALL, Inputs, Operation
from refspec.oracle.opinions import Opinion, answer
from refspec.oracle.sources import Sources

FACTORIES = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.tensor,
    torch.zeros,
}


def described(name: str) -> Operation:
    return importlib.import_module(module_of(name)).OPERATION


def cases_of(operation: Operation) -> Iterator[Inputs]:
    """The edges and a few random cases."""
    yield from operation.edges().values()
    rng = random.Random(0)
    for _ in range(5):
        yield operation.draw(rng, SMALL)


# --- devices ----------------------------------------------------------------------------------------------------------


class EveryBufferNamesItsDevice(TorchFunctionMode):
    """A buffer made without a device is on the CPU, also where the inputs are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES:
            assert "device" in (kwargs or {}), f"torch.{func.__name__} without a device"
        return func(*args, **kwargs or {})


class Untouched:
    """In the place of SGLang's files: whatever is launched does nothing, and what is called returns buffers of ours."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace() if name.startswith("__") else self._file

    def _file(self, *_: str) -> Any:
        return SglangFile()


class SglangFile:
    """Any function, any kernel."""

    def __getattr__(self, name: str) -> Any:
        x = torch.zeros(3, device="cpu")
        returned = {
            "build_chain_tree": [x] * 6,
            "compute_widened_draft_extend_locs_positions_triton": (x, x),
            "draft_topk1_postprocess": (x, x),
            "gather_spec_extras": (x, x, x, x),
            "prepare_draft_extend_inputs": (x, x, x),
            "prepare_draft_extend_layout": (x, (x, x, x)),
            "prepare_verify_commit_outputs": (x, x),
        }.get(name)
        return Kernel(returned)


class Kernel:
    """To be called, or to be launched with a grid."""

    def __init__(self, returned: object) -> None:
        self.returned = returned

    def __call__(self, *_: object, **__: object) -> object:
        return self.returned

    def __getitem__(self, grid: object) -> Kernel:
        return self


SGLANG = [name for name in operation_names() if described(name).sglang]
SGL_KERNEL = [name for name in operation_names() if described(name).sgl_kernel]


@pytest.mark.parametrize("name", SGLANG)
def test_sglangs_triton_gets_buffers_on_the_inputs_device(name: str) -> None:
    operation, asked = described(name), 0
    assert operation.sglang
    for inputs in cases_of(operation):
        if operation.sglang_takes(inputs):
            asked += 1
            with EveryBufferNamesItsDevice():
                operation.sglang(Untouched(), inputs)  # type: ignore[arg-type]
    assert asked > 5


@pytest.mark.parametrize("name", SGL_KERNEL)
def test_sglangs_cuda_gets_buffers_on_the_inputs_device(name: str) -> None:
    operation, asked = described(name), 0
    assert operation.sgl_kernel
    for inputs in cases_of(operation):
        if operation.sgl_kernel_takes(inputs):
            asked += 1
            with EveryBufferNamesItsDevice():
                operation.sgl_kernel(lambda *_: None, inputs)
    assert asked > 5


@both_backends
@pytest.mark.parametrize("name", operation_names())
def test_ours_makes_buffers_on_the_inputs_device(name: str, backend: str) -> None:
    operation = described(name)
    rng = random.Random(0)
    for inputs in (operation.draw(rng, SMALL) for _ in range(3)):
        with EveryBufferNamesItsDevice():
            operation.ours(inputs, backend)


def test_a_buffer_without_a_device_would_be_found() -> None:
    with pytest.raises(AssertionError, match=r"torch\.zeros without a device"), EveryBufferNamesItsDevice():
        torch.zeros(3)


# --- sgl_kernel -------------------------------------------------------------------------------------------------------


def check(shapes: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]]) -> None:
    """By name: a tensor, and what the CUDA reads it as."""
    for name, (x, shape, dtype) in shapes.items():
        assert (tuple(x.shape), x.dtype, x.is_contiguous()) == (shape, dtype, True), name


I32, I64, F32 = torch.int32, torch.int64, torch.float32


class Signatures:
    """The functions of sgl_kernel, by what SGLang's sgl-kernel/python/sgl_kernel/speculative.py @0.5.9 and the CUDA
    behind it ask for. The answers are our reference's.
    """

    @staticmethod
    def tree_speculative_sampling_target_only(
        predicts: Tensor,
        accept_index: Tensor,
        accept_token_num: Tensor,
        candidates: Tensor,
        retrive_index: Tensor,
        retrive_next_token: Tensor,
        retrive_next_sibling: Tensor,
        uniform_samples: Tensor,
        uniform_samples_for_final_sampling: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        threshold_single: float = 1.0,
        threshold_acc: float = 1.0,
        deterministic: bool = True,
    ) -> None:
        b, n = candidates.shape
        steps, vocab = accept_index.shape[1] - 1, target_probs.shape[2]
        check_walk(predicts, accept_index, accept_token_num, candidates, steps)
        check_links(retrive_index, retrive_next_token, retrive_next_sibling, b, n)
        check(
            {
                "uniform_samples": (uniform_samples, (b, n), F32),
                "uniform_samples_for_final_sampling": (uniform_samples_for_final_sampling, (b,), F32),
                "target_probs": (target_probs, (b, n, vocab), F32),
                "draft_probs": (draft_probs, (b, n, vocab), F32),
            }
        )
        assert not draft_probs.any()
        assert deterministic is True
        links = retrive_index, retrive_next_token, retrive_next_sibling
        answers = tree_sampling_target_only(
            candidates,
            *links,
            target_probs,
            uniform_samples,
            uniform_samples_for_final_sampling,
            steps,
            threshold_single=threshold_single,
            threshold_acc=threshold_acc,
            backend="torch",
        )
        write((predicts, accept_index, accept_token_num), answers)

    @staticmethod
    def verify_tree_greedy(
        predicts: Tensor,
        accept_index: Tensor,
        accept_token_num: Tensor,
        candidates: Tensor,
        retrive_index: Tensor,
        retrive_next_token: Tensor,
        retrive_next_sibling: Tensor,
        target_predict: Tensor,
    ) -> None:
        b, n = candidates.shape
        steps = accept_index.shape[1] - 1
        check_walk(predicts, accept_index, accept_token_num, candidates, steps)
        check_links(retrive_index, retrive_next_token, retrive_next_sibling, b, n)
        check({"target_predict": (target_predict, (b, n), I64)})
        links = retrive_index, retrive_next_token, retrive_next_sibling
        answers = verify_tree_greedy(candidates, *links, target_predict, steps, backend="torch")
        write((predicts, accept_index, accept_token_num), answers)

    @staticmethod
    def build_tree_kernel_efficient(
        parent_list: Tensor,
        selected_index: Tensor,
        verified_seq_len: Tensor,
        tree_mask: Tensor,
        positions: Tensor,
        retrive_index: Tensor,
        retrive_next_token: Tensor,
        retrive_next_sibling: Tensor,
        topk: int,
        depth: int,
        draft_token_num: int,
        tree_mask_mode: int,
    ) -> None:
        b, n = len(verified_seq_len), draft_token_num
        mode = ("full", "qlen", "packed")[tree_mask_mode]
        word = torch.uint8 if n <= 8 else torch.uint16 if n <= 16 else torch.uint32
        size = {"full": n * (int(verified_seq_len.sum()) + b * n), "qlen": b * n * n, "packed": b * n}[mode]
        check(
            {
                "parent_list": (parent_list, (b, topk * (depth - 1) + 1 if depth > 1 else 0), I64),
                "selected_index": (selected_index, (b, n - 1), I64),
                "verified_seq_len": (verified_seq_len, (b,), I64),
                "tree_mask": (tree_mask, (size,), word if mode == "packed" else torch.bool),
                "positions": (positions, (b * n,), I64),
            }
        )
        check_links(retrive_index, retrive_next_token, retrive_next_sibling, b, n)
        # It writes the trees' own columns alone, sets bits without clearing others, and takes -1 for "no link yet".
        assert not tree_mask.view(torch.uint8).any() if mode == "packed" else tree_mask.all()
        links = retrive_index, retrive_next_token, retrive_next_sibling
        assert all(bool((link == -1).all()) for link in links)
        answers = build_tree(
            parent_list, selected_index, verified_seq_len, topk, depth, n, mask_mode=mode, backend="torch"
        )
        write((tree_mask.view(answers[0].dtype), positions, *links), answers)

    @staticmethod
    def reconstruct_indices_from_tree_mask(
        tree_mask: Tensor,
        verified_seq_len: Tensor,
        positions: Tensor,
        retrive_index: Tensor,
        retrive_next_token: Tensor,
        retrive_next_sibling: Tensor,
        batch_size: int,
        draft_token_num: int,
    ) -> None:
        b, n = batch_size, draft_token_num
        check(
            {
                "tree_mask": (tree_mask, (b * n * n,), torch.bool),
                "verified_seq_len": (verified_seq_len, (b,), I64),
                "positions": (positions, (b * n,), I64),
            }
        )
        check_links(retrive_index, retrive_next_token, retrive_next_sibling, b, n)
        answers = links_from_mask(tree_mask.view(b, n, n), backend="torch")
        write((retrive_index, retrive_next_token, retrive_next_sibling), answers)


def check_walk(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, steps: int
) -> None:
    """What every walk is handed; rows that it does not reach keep what its caller wrote."""
    b, n = candidates.shape
    check(
        {
            "predicts": (predicts, (b * n,), I32),
            "accept_index": (accept_index, (b, steps + 1), I32),
            "accept_token_num": (accept_token_num, (b,), I32),
            "candidates": (candidates, (b, n), I64),
        }
    )
    assert not predicts.any()
    assert (accept_index == -1).all()


def check_links(index: Tensor, child: Tensor, sibling: Tensor, b: int, n: int) -> None:
    check(
        {
            "retrive_index": (index, (b, n), I64),
            "retrive_next_token": (child, (b, n), I64),
            "retrive_next_sibling": (sibling, (b, n), I64),
        }
    )


def write(buffers: tuple[Tensor, ...], answers: tuple[Tensor, ...]) -> None:
    for buffer, x in zip(buffers, answers, strict=True):
        assert (buffer.dtype, buffer.shape) == (x.dtype, x.shape)
        buffer.copy_(x)


@pytest.mark.parametrize("name", SGL_KERNEL)
def test_functions_of_sgl_kernel_get_what_they_ask_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its CUDA then agrees shows only on a GPU: refspec oracle check."""
    package = ModuleType("sgl_kernel")
    package.__dict__.update({name: function for name, function in vars(Signatures).items() if name[0] != "_"})
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    operation, asked = described(name), 0
    functions: list[Callable[..., None]] = []
    for inputs in cases_of(operation):
        if not operation.sgl_kernel_takes(inputs):
            continue
        asked += 1
        functions.append(getattr(package, operation.sgl_kernel_function))
        said = answer(Opinion("sgl_kernel", "sgl_kernel"), operation, Sources({}), inputs)
        expected = operation.ours(inputs, "torch")
        assert said.keys() == expected.keys()
        assert all(torch.equal(x, expected[key]) for key, x in said.items())
    assert asked > 5


def test_packed_masks_have_an_oracle_in_cuda_alone() -> None:
    operation = described("build_tree")
    packed = [inputs for inputs in operation.edges().values() if inputs["mask_mode"] == "packed"]
    assert packed
    assert all(operation.sgl_kernel_takes(inputs) and not operation.sglang_takes(inputs) for inputs in packed)
