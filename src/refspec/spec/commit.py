"""Phase 4: what was accepted becomes output and cache; the rest goes back.

Tokens are appended one by one, since any of them may end the request; a stop cuts the block, and the slots behind
it are freed like rejected ones. The bonus is output, but not yet cache: its keys and values will be computed when
it is the root of the next round's tree. So a round that commits a tokens keeps a slots, those of the root and of
all but the last of them.

Source: SGLang: python/sglang/srt/speculative/eagle_utils.py:EagleVerifyInput.verify @v0.4.6
"""

from __future__ import annotations

import torch

from refspec.contracts import CommitOutput, VerifyOutput
from refspec.kernels import assign_req_to_token
from refspec.memory.allocator import SlotAllocator
from refspec.requests.finish import append_tokens
from refspec.requests.request import RunningBatch


def commit(batch: RunningBatch, verified: VerifyOutput, allocator: SlotAllocator) -> CommitOutput:
    """Afterwards every request has its new tokens, and finish_reason if one of them ended it; of verify's slots
    only the kept ones are still taken, entered in the request table in path order; seq_lens have advanced.
    """
    # region commit_block
    predict, paths = verified.predict.tolist(), verified.accept_index.tolist()
    kept_rows: list[list[int]] = []
    for request, path in zip(batch.requests, paths, strict=True):
        accepted = [row for row in path if row != -1]
        accept_len = append_tokens(request, (predict[row] for row in accepted))
        request.accept_lens.append(accept_len)
        request.kv_len += accept_len
        kept_rows.append(accepted[:accept_len])
    accept_lens = [len(rows) for rows in kept_rows]

    device = batch.seq_lens.device
    kept = torch.tensor([row for rows in kept_rows for row in rows], dtype=torch.int64, device=device)
    rejected = torch.ones_like(verified.out_slots, dtype=torch.bool)
    rejected[kept] = False
    freed_slots = verified.out_slots[rejected]
    allocator.free(freed_slots)

    advanced = batch.seq_lens + torch.tensor(accept_lens, dtype=torch.int64, device=device)
    assign_req_to_token(batch.req_to_token, batch.rows, batch.seq_lens, advanced, verified.out_slots[kept])
    batch.seq_lens = advanced
    return CommitOutput(accept_lens, kept_rows, freed_slots)
    # endregion commit_block
