"""Which slot holds which token: one row per running request, one column per position.

Source: SGLang: python/sglang/srt/mem_cache/memory_pool.py:ReqToTokenPool @v0.4.6
"""

from __future__ import annotations

import torch


class ReqTable:
    """req_to_token: i64 (rows + 1, max_context). Row 0 belongs to padding and is never handed out.

    Entries from a request's committed length on are stale; nobody may read them.
    """

    def __init__(self, rows: int, max_context: int, device: torch.device) -> None:
        self.req_to_token = torch.zeros(rows + 1, max_context, dtype=torch.int64, device=device)
        self.free_rows = list(range(1, rows + 1))

    def alloc(self) -> int:
        """A row for a new request. The caller makes sure that one is free."""
        return self.free_rows.pop(0)

    def free(self, row: int) -> None:
        if not 1 <= row < len(self.req_to_token):
            raise ValueError(f"row {row} of the request table belongs to no request")
        if row in self.free_rows:
            raise ValueError(f"row {row} of the request table was freed twice")
        self.free_rows.append(row)
