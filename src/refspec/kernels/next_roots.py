"""Where the next round starts: the bonus of each request, and how long its request is with what was accepted.

A round that was handed to the device ahead of its forerunner's end cannot ask the host for them. The bonus is the
target's choice after the last accepted node, which accept_index names.

Bytes moved for each request: 20 in (its length, its number of accepted drafts, its last accepted row, that row's token)
and 20 out.

Source: SGLang: python/sglang/kernels/ops/speculative/eagle.py:prepare_verify_commit_outputs @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch


def next_roots_torch(
    predict: Tensor, accept_index: Tensor, accept_token_num: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `next_roots`."""
    accept_lens = accept_token_num + 1
    last_rows = accept_index.gather(1, accept_token_num.long().unsqueeze(1)).squeeze(1)
    return accept_lens, seq_lens + accept_lens, predict[last_rows].long()


@triton.jit(do_not_specialize=["b", "rows"])
def _next_roots_kernel(
    predict,
    accept_index,
    accept_token_num,
    seq_lens,
    accept_lens,
    new_seq_lens,
    bonus_tokens,
    b,
    d,
    rows,
    BLOCK: tl.constexpr,
):
    """Program t does the t-th BLOCK requests."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = r < b
    drafts = tl.load(accept_token_num + r, inside, other=0)
    tl.store(accept_lens + r, drafts + 1, inside)
    tl.store(new_seq_lens + r, tl.load(seq_lens + r, inside, other=0) + drafts + 1, inside)
    last = tl.load(accept_index + r * d + drafts, inside & (drafts >= 0) & (drafts < d), other=-1)
    token = tl.load(predict + last, (last >= 0) & (last < rows), other=0)  # whatever it says, not beyond the buffer
    tl.store(bonus_tokens + r, token.to(tl.int64), inside)


def next_roots_triton(
    predict: Tensor, accept_index: Tensor, accept_token_num: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's launch."""
    (b, d), device = accept_index.shape, predict.device
    accept_lens = torch.empty(b, dtype=torch.int32, device=device)
    new_seq_lens, bonus_tokens = (torch.empty(b, dtype=torch.int64, device=device) for _ in range(2))
    if b:
        block = 128
        _next_roots_kernel[(triton.cdiv(b, block),)](
            predict,
            accept_index,
            accept_token_num,
            seq_lens,
            accept_lens,
            new_seq_lens,
            bonus_tokens,
            b,
            d,
            len(predict),
            BLOCK=block,
            num_warps=4,
        )
    return accept_lens, new_seq_lens, bonus_tokens


def next_roots(
    predict: Tensor, accept_index: Tensor, accept_token_num: Tensor, seq_lens: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """predict i32 (b*N), accept_index i32 (b, D), accept_token_num i32 (b): what verification gave, rows where it left
    them; seq_lens i64 (b): committed before this round.

    Returns (accept_lens i32 (b): accept_token_num + 1, the bonus counts; seq_lens i64 (b) with them; bonus_tokens i64
    (b)): the next round's roots and their positions.
    Raises ValueError for other shapes or types, and, where values are checked, for a path that lacks its last row.
    """
    run = choose(backend, device_of("predict", predict), next_roots_torch, next_roots_triton)
    check_tensor("predict", predict, (None,), torch.int32)
    check_tensor("accept_index", accept_index, (None, None), torch.int32, predict.device)
    b, d = accept_index.shape
    check_tensor("accept_token_num", accept_token_num, (b,), torch.int32, predict.device)
    check_tensor("seq_lens", seq_lens, (b,), device=predict.device)
    check_bounds("accept_token_num", accept_token_num, 0, d)
    if values_are_checked(predict.device):
        last_rows = accept_index.gather(1, accept_token_num.long().unsqueeze(1))
        check_bounds("accept_index, where accept_token_num says that a path ends,", last_rows, 0, len(predict))
    count_launch("next_roots")
    return run(predict, accept_index, accept_token_num, seq_lens)
