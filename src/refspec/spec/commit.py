"""Phase 4: what was accepted becomes output and cache; the rest goes back.

Tokens are appended one by one, since any of them may end the request; a stop cuts the block, and the slots behind
it are freed like rejected ones. The bonus is output, but not yet cache: its keys and values will be computed when
it is the root of the next round's tree. So a round that commits a tokens keeps a slots, those of the root and of
all but the last of them.

Source: SGLang: python/sglang/srt/speculative/eagle_utils.py:EagleVerifyInput.verify @v0.4.6
"""

from __future__ import annotations

import torch

from refspec.config import SpecConfig
from refspec.contracts import CommitOutput, VerifyOutput
from refspec.kernels import (
    align_evict_mask_to_page_size,
    assign_req_to_token,
    compact_to_front,
    compaction_moves,
    move_kv_cache,
)
from refspec.memory.allocator import SlotAllocator
from refspec.requests.finish import append_tokens
from refspec.requests.logprobs import append_logprobs
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner, require_finite_logits


def commit(
    batch: RunningBatch,
    verified: VerifyOutput,
    target_runner: ModelRunner,
    allocator: SlotAllocator,
    config: SpecConfig,
) -> CommitOutput:
    """Afterwards every request has its new tokens, and finish_reason if one of them ended it; of verify's slots
    only the kept ones are still taken, entered in the request table in path order; seq_lens have advanced.

    With pages and branching trees the kept rows have come to the front of their requests' rows, and kept_rows says so.
    """
    # region commit_block
    require_finite_logits(verified.finite)
    predict, paths = verified.predict.tolist(), verified.accept_index.tolist()
    kept_rows: list[list[int]] = []
    for request, path in zip(batch.requests, paths, strict=True):
        accepted = [row for row in path if row != -1]
        accept_len = append_tokens(request, (predict[row] for row in accepted))
        request.accept_lens.append(accept_len)
        request.kv_len += accept_len
        kept_rows.append(accepted[:accept_len])
    append_logprobs(batch.requests, verified.logits, kept_rows)
    if config.page_size > 1 and not config.is_chain:
        kept_rows = compact(verified, kept_rows, target_runner, config)
    accept_lens = [len(rows) for rows in kept_rows]

    device = batch.seq_lens.device
    kept = torch.tensor([row for rows in kept_rows for row in rows], dtype=torch.int64, device=device)
    rejected = torch.ones_like(verified.out_slots, dtype=torch.bool)
    rejected[kept] = False
    if config.page_size > 1:  # a page that holds a kept token stays, whatever else is in it
        align_evict_mask_to_page_size(batch.seq_lens, rejected.view(-1, config.num_draft_tokens), config.page_size)
    freed_slots = verified.out_slots[rejected]
    allocator.free(freed_slots)

    advanced = batch.seq_lens + torch.tensor(accept_lens, dtype=torch.int64, device=device)
    assign_req_to_token(batch.req_to_token, batch.rows, batch.seq_lens, advanced, verified.out_slots[kept])
    batch.seq_lens = advanced
    return CommitOutput(accept_lens, kept_rows, freed_slots)
    # endregion commit_block


def compact(
    verified: VerifyOutput, kept_rows: list[list[int]], target_runner: ModelRunner, config: SpecConfig
) -> list[list[int]]:
    """Move the kept rows of every request to the front of its rows: keys and values, predict, hidden states.

    kept_rows: of each request, in the order of the path. Returns where they are now.

    Kept rows of a tree lie scattered over its slots, and so over its pages: each page that holds one would have to
    stay. A token's place in its page is that of its position, moreover, since whoever goes on behind it (an allocator,
    a kernel that reads whole pages) counts on that. On a chain the kept rows are the first ones anyway, and with
    pages of one token the request table alone puts them in order.
    """
    bring_paths_to_front(verified, target_runner, config)
    n = config.num_draft_tokens
    return [list(range(r * n, r * n + len(rows))) for r, rows in enumerate(kept_rows)]


def bring_paths_to_front(verified: VerifyOutput, target_runner: ModelRunner, config: SpecConfig) -> None:
    """Compaction on the device, whatever the host will keep: all accepted rows. On a chain there is nothing to move."""
    if config.is_chain:
        return
    paths = verified.accept_index[:, : config.num_draft_tokens].contiguous()  # N rows hold no longer path
    move_kv_cache(target_runner.pool, *compaction_moves(paths, verified.out_slots))
    verified.predict = compact_to_front(verified.predict, paths)
    verified.hidden_states = compact_to_front(verified.hidden_states, paths)
