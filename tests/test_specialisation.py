"""A server's kernels are compiled once, whatever its batches, steps and totals come to."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from refspec.kernels.backend import TRITON_INSTALLED

pytestmark = pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")

# Calls of one server: counts that are 1, a multiple of 16, and neither. B_UPPER and the like, which shape a tile, stay.
CALLS = """
import json, sys
import torch
from refspec import kernels
from refspec.bench.compile_report import record_instead_of_launching
launches = record_instead_of_launching()
made = {}
def call(operation, *arguments):
    launches.made.clear()
    getattr(kernels, operation)(*arguments, backend="triton")
    made.setdefault(operation, []).extend(kernel.hash for _, _, kernel in launches.made)
one, table = torch.tensor([0]), torch.arange(4096).view(1, 4096)
for n in (1, 2, 16, 17):
    call("assign_req_to_token", table, one, one, one + n, torch.arange(n))
    call("assign_extend_cache_locs", table, one, one, one + n, n)
    call("draft_kv_indices", table, one, one + 100 * n, 1, n, 20, 1, 100 * n)
    call("draft_topk1", torch.zeros(1, 9), one.clone(), torch.zeros(1, 20).long(), n)
    call("paged_kv_indices", table, one, one + 100 * n, torch.zeros(1, n).long(), 101 * n)
    call("ragged_extend_inputs", one + 50, (one + n).int(), torch.zeros(n).int())
for b in (33, 48, 64):
    call("padded_extend_inputs", torch.arange(b) + 9, torch.ones(b).int(), torch.zeros(16 * b).int(), 16)
    call("align_evict_mask_to_page_size", torch.arange(b), torch.ones(b, 16).bool(), 4)
    call("compact_to_front", torch.zeros(4 * b, 64), torch.full((b, 2), -1).int())
    call("compaction_moves", torch.full((b, 2), -1).int(), torch.arange(4 * b))
    call("gather_rows", torch.arange(b), [torch.zeros(b), torch.zeros(b, 64)])
    call("next_roots", torch.zeros(4 * b).int(), torch.arange(b)[:, None].int(), torch.zeros(b).int(), torch.arange(b))
    rows = torch.arange(b)
    call("rotate_input_ids", torch.zeros(2 * b).long(), 2 * rows, rows % 3, rows, 2 * rows)
    pool = torch.zeros(b, 3).long(), torch.zeros(b, 3, 64), torch.zeros(b).long()
    call("append_boundary_rows", rows, torch.zeros(b, 64), rows, rows % 2, rows, *pool)
    table = torch.zeros(b, 99).long()
    call("widened_extend_inputs", rows, torch.zeros(2 * b).int(), torch.zeros(2 * b, 64), table, rows, *pool, 2)
json.dump(made, sys.stdout)
"""


def test_counts_that_change_from_call_to_call_compile_nothing_anew() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    made = json.loads(done.stdout)
    kernels_of = {"draft_topk1": 2}
    assert {operation: len(set(hashes)) for operation, hashes in made.items()} == {
        operation: kernels_of.get(operation, 1) for operation in made
    }
    assert len(made) == 15
