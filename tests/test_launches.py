"""Every dispatcher counts its launches, takes no rows, and refuses a backend that is not there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import both_backends

from refspec import kernels

NONE = torch.zeros(0, dtype=torch.int64)
NONE_BY_TWO = torch.zeros(0, 2, dtype=torch.int64)

CALLS: dict[str, Callable[..., Any]] = {
    "align_evict_mask_to_page_size": lambda **b: kernels.align_evict_mask_to_page_size(
        NONE, NONE_BY_TWO.bool(), 4, **b
    ),
    "append_boundary_rows": lambda **b: kernels.append_boundary_rows(
        *[NONE, NONE_BY_TWO, NONE, NONE, NONE, NONE_BY_TWO, torch.zeros(0, 2, 2).long(), NONE.clone()], **b
    ),
    "assign_draft_cache_locs": lambda **b: kernels.assign_draft_cache_locs(NONE_BY_TWO, NONE, NONE, 2, 3, **b),
    "assign_extend_cache_locs": lambda **b: kernels.assign_extend_cache_locs(NONE_BY_TWO, NONE, NONE, NONE, 0, **b),
    "assign_req_to_token": lambda **b: kernels.assign_req_to_token(
        torch.zeros(2, 4).long(), NONE, NONE, NONE, NONE, **b
    ),
    "build_chain_tree": lambda **b: kernels.build_chain_tree(NONE, 2, **b),
    "build_tree": lambda **b: kernels.build_tree(NONE_BY_TWO, torch.zeros(0, 1).long(), NONE, 1, 2, 2, **b),
    "chain_rejection_sampling": lambda **b: kernels.chain_rejection_sampling(
        NONE_BY_TWO, torch.zeros(0, 2, 5), torch.zeros(0, 1, 5), torch.zeros(0, 1), torch.zeros(0), **b
    ),
    "compact_to_front": lambda **b: kernels.compact_to_front(NONE_BY_TWO, NONE_BY_TWO.int(), **b),
    "compaction_moves": lambda **b: kernels.compaction_moves(NONE_BY_TWO.int(), NONE, **b),
    "draft_kv_indices": lambda **b: kernels.draft_kv_indices(NONE_BY_TWO, NONE, NONE, 2, 0, 3, **b),
    "draft_topk1": lambda **b: kernels.draft_topk1(torch.zeros(0, 5), NONE, NONE_BY_TWO, 1, **b),
    "duplicate_prefix_tail": lambda **b: kernels.duplicate_prefix_tail(
        SimpleNamespace(layers=[]), NONE_BY_TWO, NONE, NONE, 2, 3, 4, **b
    ),
    "gather_rows": lambda **b: kernels.gather_rows(NONE, [NONE, NONE_BY_TWO.float()], **b),
    "links_from_mask": lambda **b: kernels.links_from_mask(torch.zeros(0, 2, 2).bool(), **b),
    "move_kv_cache": lambda **b: kernels.move_kv_cache(SimpleNamespace(layers=[]), NONE, NONE, **b),
    "next_roots": lambda **b: kernels.next_roots(NONE.int(), NONE_BY_TWO.int(), NONE.int(), NONE, **b),
    "padded_extend_inputs": lambda **b: kernels.padded_extend_inputs(NONE, NONE.int(), NONE.int(), 4, **b),
    "paged_kv_indices": lambda **b: kernels.paged_kv_indices(NONE_BY_TWO, NONE, NONE, NONE_BY_TWO, 0, **b),
    "ragged_extend_inputs": lambda **b: kernels.ragged_extend_inputs(NONE, NONE.int(), NONE.int(), **b),
    "rotate_input_ids": lambda **b: kernels.rotate_input_ids(*[NONE] * 5, **b),
    "stable_topk": lambda **b: kernels.stable_topk(torch.zeros(0, 3), 2, **b),
    "tree_attention": lambda **b: kernels.tree_attention(
        *[torch.zeros(0, 1, 2)] * 3, torch.zeros(1).long(), NONE, NONE.bool(), 1.0, **b
    ),
    "tree_sampling_target_only": lambda **b: kernels.tree_sampling_target_only(
        *[NONE_BY_TWO] * 4, torch.zeros(0, 2, 5), torch.zeros(0, 2), torch.zeros(0), 1, **b
    ),
    "verify_tree_greedy": lambda **b: kernels.verify_tree_greedy(*[NONE_BY_TWO] * 5, 1, **b),
    "widened_extend_inputs": lambda **b: kernels.widened_extend_inputs(
        NONE, NONE, torch.zeros(0, 5), torch.zeros(2, 9).long(), NONE, NONE_BY_TWO, torch.zeros(0, 2, 5), NONE, 4, **b
    ),
}

B, I32, I64, F32 = torch.bool, torch.int32, torch.int64, torch.float32
TREE = [((0,), B), ((0,), I64), *[((0, 2), I64)] * 3]
WALK = [((0,), I32), ((0, 2), I32), ((0,), I32)]
RETURNS: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "align_evict_mask_to_page_size": [],
    "append_boundary_rows": [],
    "assign_draft_cache_locs": [((0,), I64)],
    "assign_extend_cache_locs": [((0,), I64)],
    "assign_req_to_token": [],
    "build_chain_tree": TREE,
    "build_tree": TREE,
    "chain_rejection_sampling": WALK,
    "compact_to_front": [((0, 2), I64)],
    "compaction_moves": [((0,), I64)] * 2,
    "draft_kv_indices": [((1,), I64), ((0,), I64)],
    "draft_topk1": [((0, 1), F32), ((0, 1), I64)],
    "duplicate_prefix_tail": [],
    "gather_rows": [((0,), I64), ((0, 2), F32)],
    "links_from_mask": [((0, 2), I64)] * 3,
    "move_kv_cache": [],
    "next_roots": [((0,), I32), ((0,), I64), ((0,), I64)],
    "padded_extend_inputs": [((0,), I64)] * 3,
    "paged_kv_indices": [((1,), I64), ((0,), I64)],
    "ragged_extend_inputs": [((0,), I64)] * 3,
    "rotate_input_ids": [],
    "stable_topk": [((0, 2), F32), ((0, 2), I64)],
    "tree_attention": [((0, 1, 2), F32)],
    "tree_sampling_target_only": WALK,
    "verify_tree_greedy": WALK,
    "widened_extend_inputs": [((0,), I64), ((0, 5), F32), ((0,), I64), ((0,), I64)],
}


def test_every_operation_of_the_package_is_tried_here() -> None:
    assert set(CALLS) | {"launches"} == set(RETURNS) | {"launches"} == set(kernels.__all__)


@both_backends
@pytest.mark.parametrize("operation", CALLS)
def test_SEQ_08_no_rows_give_empty_outputs_of_the_right_shape_and_dtype(operation: str, backend: str) -> None:
    returned = CALLS[operation](backend=backend)
    outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned or [])
    assert [(tuple(x.shape), x.dtype) for x in outputs] == RETURNS[operation]
    assert all(not x.any() for x in outputs)


@pytest.mark.parametrize("operation", CALLS)
def test_a_call_counts_as_one_launch_even_for_no_rows(operation: str) -> None:
    before = kernels.launches.copy()
    CALLS[operation]()
    CALLS[operation](backend="torch")
    assert kernels.launches - before == {operation: 2}


@pytest.mark.parametrize("operation", CALLS)
def test_unknown_backend_is_refused_and_not_counted(operation: str) -> None:
    before = kernels.launches.copy()
    with pytest.raises(ValueError, match=r"backend is 'cuda-graphs'"):
        CALLS[operation](backend="cuda-graphs")
    assert kernels.launches == before
