"""Calls of every kernel at the sizes at which a server makes them, and the bytes that each must move.

`refspec bench kernels` times these calls on a GPU; its --compile-report compiles what they launch, on any machine. How
many bytes an operation must move is derived in its own file; here the sizes are filled in. What it need not move for
these inputs (a row that several programs read, links that no walk comes to, a mask that stays as it is) is not counted:
the bound is one that no kernel beats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from refspec import kernels
from refspec.memory.kv_pool import KVLayout, MHATokenToKVPool
from refspec.spec.draft import select_top_k_tokens
from refspec.spec.tree import organize_draft_results

I64, I32, F32 = 8, 4, 4  # bytes


@dataclass(frozen=True)
class Serving:
    """What a server has in hand. Contexts are spread evenly between the shortest and the longest."""

    batch: int
    topk: int
    num_steps: int
    num_draft_tokens: int
    contexts: tuple[int, int] = (1024, 8192)
    page_sizes: tuple[int, ...] = (1, 16)
    vocabularies: tuple[int, ...] = (1024, 32000, 128256)
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"b{self.batch} k{self.topk} S{self.num_steps} N{self.num_draft_tokens}"


SERVINGS = (Serving(32, 1, 5, 6), Serving(1, 8, 5, 32), Serving(32, 8, 5, 32), Serving(32, 8, 5, 64))


@dataclass(frozen=True)
class Case:
    """One call: the arguments of the dispatcher (all but backend), and the bytes that it must move."""

    label: str
    arguments: dict[str, Any]
    bytes: int


def kernel_cases(operation: str, device: torch.device, servings: Sequence[Serving] = SERVINGS) -> Iterator[Case]:
    """The cases of an operation, one after the other, each drawn when it is asked for: some take a gigabyte.

    The same on every device, but for large arrays of floats: see `_floats`. Raises KeyError for what is no operation.
    """
    for serving in servings:
        yield from CASES[operation](serving, device)


def run_case(operation: str, case: Case, backend: str) -> Any:
    """Call the operation's dispatcher. It may change the case's arguments, and can be called with them again."""
    return getattr(kernels, operation)(**case.arguments, backend=backend)


# --- what cases are made of -------------------------------------------------------------------------------------------


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _floats(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers from 0 to 1. A large array on a CPU stays zero, and so takes no memory: only the compiler report makes
    such, and what it compiles does not depend on what is in them.
    """
    x = torch.zeros(shape, dtype=dtype, device=device)
    return x if _stays_zero(x) else x.uniform_(generator=torch.Generator(device).manual_seed(0))


def _stays_zero(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() > 1 << 20


def _laws(*shape: int, device: torch.device) -> Tensor:
    """Probabilities over the last dimension, f32."""
    x = _floats(*shape, device=device)
    return x if _stays_zero(x) else torch.softmax(x.mul_(20), dim=-1)


def _seq_lens(s: Serving) -> Tensor:
    """i64 (b), on the CPU."""
    return torch.linspace(*s.contexts, s.batch).long()


@dataclass(frozen=True)
class _Table:
    """Requests in a request table, with room for the draft and the nodes behind each; slots in random pages."""

    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    slots: int  # of the pool

    @classmethod
    def of(cls, s: Serving, page_size: int, device: torch.device) -> _Table:
        room = max(s.num_draft_tokens, s.topk * (s.num_steps + 2 * page_size))
        pages = -(-(s.contexts[1] + room) // page_size) + 1
        first_slots = torch.randperm(s.batch * pages, generator=_rng()).view(s.batch, pages) * page_size
        table = first_slots.unsqueeze(2) + torch.arange(page_size)
        return cls(
            table.flatten(1).add(page_size).to(device),  # page 0 is the dummy's
            torch.randperm(s.batch, generator=_rng()).to(device),
            _seq_lens(s).to(device),
            (s.batch * pages + 1) * page_size,
        )


def _kept(s: Serving) -> tuple[Tensor, Tensor, Tensor]:
    """parent_list, top_scores_index and the kept tokens of drafts that are as sure as random numbers, on the CPU."""
    rng, b, k = _rng(), s.batch, s.topk
    hidden, scores, levels = torch.zeros(b, 1), torch.zeros(0), []
    for i in range(s.num_steps):
        rows = b * k if i else b
        topk_p = torch.rand(rows, k, generator=rng).sort(descending=True).values
        topk_index = torch.rand(rows, s.vocabularies[0], generator=rng).topk(k).indices  # siblings are different
        _, hidden, scores, level = select_top_k_tokens(i, topk_p, topk_index, hidden, topk_p if i == 0 else scores, k)
        levels.append(level)
    score_list, token_list, parents_list = (list(column) for column in zip(*levels, strict=True))
    return organize_draft_results(score_list, token_list, parents_list, s.num_draft_tokens)


def _tree(s: Serving, mask_mode: str = "qlen") -> dict[str, Tensor]:
    """candidates, links and mask of such trees, on the CPU."""
    parent_list, top_scores_index, tokens = _kept(s)
    tree_mask, _, index, next_token, next_sibling = kernels.build_tree(
        parent_list, top_scores_index, _seq_lens(s), s.topk, s.num_steps, s.num_draft_tokens, mask_mode, backend="torch"
    )
    return {
        "candidates": torch.cat([torch.zeros(s.batch, 1, dtype=torch.int64), tokens], dim=1),
        "retrieve_index": index,
        "retrieve_next_token": next_token,
        "retrieve_next_sibling": next_sibling,
        "tree_mask": tree_mask,
    }


def _walkable(s: Serving, device: torch.device) -> dict[str, Tensor]:
    """candidates and links."""
    return {name: x.to(device) for name, x in _tree(s).items() if name != "tree_mask"}


def _accept_lens(s: Serving) -> Tensor:
    """i64 (b), from 1 to S+1, on the CPU."""
    return torch.arange(s.batch) % (s.num_steps + 1) + 1


def _accept_index(s: Serving) -> Tensor:
    """i32 (b, S+1), on the CPU: of each request's rows the first, then every second (or the next, where N is small)."""
    depth = torch.arange(s.num_steps + 1)
    stride = max(1, min(2, (s.num_draft_tokens - 1) // max(1, s.num_steps)))
    rows = torch.arange(s.batch)[:, None] * s.num_draft_tokens + depth * stride
    return rows.masked_fill(depth >= _accept_lens(s)[:, None], -1).int()


# --- the operations ---------------------------------------------------------------------------------------------------


def _mask_bytes(s: Serving, mask_mode: str) -> int:
    n = s.num_draft_tokens
    if mask_mode == "full":
        return n * (int(_seq_lens(s).sum()) + s.batch * n)
    return s.batch * n * (n if mask_mode == "qlen" else 1 if n <= 8 else 2 if n <= 16 else 4)


def _mask_modes(s: Serving) -> tuple[str, ...]:
    return ("full", "qlen", "packed") if s.num_draft_tokens <= 32 else ("full", "qlen")


def _align_evict_mask_to_page_size(s: Serving, device: torch.device) -> Iterator[Case]:
    b, n = s.batch, s.num_draft_tokens
    evict = torch.arange(n) >= _accept_lens(s)[:, None]
    for page_size in s.page_sizes:
        if page_size > 1:
            aligned = evict.clone()
            kernels.align_evict_mask_to_page_size(_seq_lens(s), aligned, page_size, backend="torch")
            changed = int((aligned != evict).sum())
            arguments = {
                "seq_lens": _seq_lens(s).to(device),
                "evict_mask": evict.clone().to(device),
                "page_size": page_size,
            }
            yield Case(f"{s} page {page_size}", arguments, I64 * b + b * n + changed)


def _append_boundary_rows(s: Serving, device: torch.device) -> Iterator[Case]:
    """The kept rows of a chain, after a round."""
    front, n = s.num_steps - 1, s.num_draft_tokens
    if s.topk > 1 or not front:
        return
    hidden = _floats(s.batch * n, s.hidden, device=device, dtype=torch.bfloat16)
    accept_lens = _accept_lens(s)
    arguments = {
        "tokens": torch.zeros(s.batch * n, dtype=torch.int32, device=device),
        "hidden_states": hidden,
        "ends": (torch.arange(s.batch) * n + accept_lens).to(device),
        "lens": accept_lens.to(device),
        "rows": torch.randperm(s.batch, generator=_rng()).to(device),
        **_boundary_pool(s, front, device),
    }
    moved = s.batch * front * 2 * (hidden[0].nbytes + I64) + s.batch * 5 * I64
    yield Case(str(s), arguments, moved - I32 * int(accept_lens.clamp(max=front).sum()))  # new tokens are read as i32


def _boundary_pool(s: Serving, front: int, device: torch.device) -> dict[str, Tensor]:
    """A full pool, of as many rows as there are requests."""
    return {
        "kept_tokens": torch.zeros(s.batch, front, dtype=torch.int64, device=device),
        "kept_hidden": _floats(s.batch, front, s.hidden, device=device, dtype=torch.bfloat16),
        "kept_lens": torch.full((s.batch,), front, device=device),
    }


def _assign_draft_cache_locs(s: Serving, device: torch.device) -> Iterator[Case]:
    for page_size in s.page_sizes:
        table = _Table.of(s, page_size, device)
        arguments = {
            "req_to_token": table.req_to_token,
            "req_pool_indices": table.req_pool_indices,
            "seq_lens": table.seq_lens,
            "topk": s.topk,
            "num_steps": s.num_steps,
            "page_size": page_size,
        }
        slots = s.batch * s.topk * s.num_steps
        yield Case(f"{s} page {page_size}", arguments, 2 * I64 * slots + 2 * I64 * s.batch)


def _span(s: Serving, device: torch.device, first: bool) -> tuple[dict[str, Any], int]:
    """Places in the table, of all committed tokens or of the N behind them, and how many those are."""
    table = _Table.of(s, 1, device)
    start = torch.zeros_like(table.seq_lens) if first else table.seq_lens
    end = table.seq_lens if first else table.seq_lens + s.num_draft_tokens
    arguments = {
        "req_to_token": table.req_to_token,
        "req_pool_indices": table.req_pool_indices,
        "start": start,
        "end": end,
    }
    return arguments, int((end - start).sum())


def _assign_extend_cache_locs(s: Serving, device: torch.device) -> Iterator[Case]:
    arguments, total = _span(s, device, first=False)
    yield Case(str(s), {**arguments, "total": total}, 2 * I64 * total + 3 * I64 * s.batch)


def _assign_req_to_token(s: Serving, device: torch.device) -> Iterator[Case]:
    for label, first in (("the nodes", False), ("a prefill", True)):
        arguments, total = _span(s, device, first)
        slots = torch.arange(1, total + 1, device=device)
        yield Case(f"{s} {label}", {**arguments, "slots": slots}, 2 * I64 * total + 3 * I64 * s.batch)


def _build_chain_tree(s: Serving, device: torch.device) -> Iterator[Case]:
    if s.topk == 1 and s.num_draft_tokens == s.num_steps + 1:
        b, n = s.batch, s.num_draft_tokens
        for mask_mode in _mask_modes(s):
            arguments = {"seq_lens": _seq_lens(s).to(device), "num_draft_tokens": n, "mask_mode": mask_mode}
            yield Case(f"{s} {mask_mode}", arguments, I64 * b + 4 * I64 * b * n + _mask_bytes(s, mask_mode))


def _build_tree(s: Serving, device: torch.device) -> Iterator[Case]:
    b, n = s.batch, s.num_draft_tokens
    parent_list, top_scores_index, _ = _kept(s)
    # Entry 0 is the root's; a parent of several nodes is read once.
    parents_read = sum(len(row[row > 0].unique()) for row in top_scores_index // s.topk)
    for mask_mode in _mask_modes(s):
        arguments = {
            "parent_list": parent_list.to(device),
            "top_scores_index": top_scores_index.to(device),
            "seq_lens": _seq_lens(s).to(device),
            "topk": s.topk,
            "num_steps": s.num_steps,
            "num_draft_tokens": n,
            "mask_mode": mask_mode,
        }
        moved = I64 * (b * (n - 1 + 1 + 4 * n) + parents_read) + _mask_bytes(s, mask_mode)
        yield Case(f"{s} {mask_mode}", arguments, moved)


def _chain_rejection_sampling(s: Serving, device: torch.device) -> Iterator[Case]:
    if s.topk > 1 or s.num_draft_tokens != s.num_steps + 1:
        return
    b, n, steps = s.batch, s.num_draft_tokens, s.num_steps
    for vocabulary in s.vocabularies:
        candidates = torch.randint(vocabulary, (b, n), generator=_rng()).to(device)
        p, q = _laws(b, n, vocabulary, device=device), _laws(b, steps, vocabulary, device=device)
        coins = _floats(b, steps, device=device)
        for block in (False, True):
            arguments = {
                "candidates": candidates,
                "target_probs": p,
                "draft_probs": q,
                "coins": coins,
                "final_coins": _floats(b, device=device),
                "block_verification": block,
            }
            label = f"{s} V{vocabulary} {'block' if block else 'classic'}"
            yield Case(label, arguments, F32 * vocabulary * rows_to_read(candidates, p, q, coins, block))


def rows_to_read(candidates: Tensor, p: Tensor, q: Tensor, coins: Tensor, block: bool) -> int:
    """How many rows of p and of q the answer depends on as a whole; what single tokens' entries decide is little.

    Those where the chain ends; behind the last draft there is no q. Block verification, from the last draft back to the
    first prefix that stands, has to weigh those after each draft i < S with coin_i < h_i < 1 too.
    """
    tokens = candidates[:, 1:, None]
    of_p, of_q = p[:, :-1].gather(2, tokens).squeeze(2), q.gather(2, tokens).squeeze(2)
    s, rows = coins.shape[1], 0
    if block:
        h, ratios = torch.ones(len(p), s, device=p.device), torch.where(of_q > 0, of_p / of_q, 0)
        for draft in range(s):
            h[:, draft] = (h[:, draft - 1] * ratios[:, draft] if draft else ratios[:, 0]).clamp(max=1)
        weighed = (coins < h) & (h < 1)
        weighed[:, -1] = False
        r, i = weighed.nonzero(as_tuple=True)
        left = (h[r, i, None] * p[r, i + 1] - q[r, i + 1]).clamp(min=0).sum(1)
        rule = h.clone()
        rule[r, i] = left / (left + 1 - h[r, i])
        prefix = torch.arange(1, s + 1, device=p.device)
        accepted = ((coins < rule) * prefix).amax(1)
        rows = 2 * int((weighed & (prefix > accepted[:, None])).sum())
    else:
        accepted = (coins * of_q < of_p).long().cumprod(1).sum(1)
    return rows + 2 * len(p) - int((accepted == s).sum())


def _compact_to_front(s: Serving, device: torch.device) -> Iterator[Case]:
    b, n = s.batch, s.num_draft_tokens
    for label, x in (
        ("hidden states", _floats(b * n, s.hidden, device=device, dtype=torch.bfloat16)),
        ("predict", torch.zeros(b * n, dtype=torch.int32, device=device)),
    ):
        arguments = {"x": x, "accept_index": _accept_index(s).to(device)}
        moved = kernels.compact_to_front(torch.arange(b * n), arguments["accept_index"].cpu(), backend="torch")
        read = len(moved.unique()) * x[0].nbytes  # a row that goes to the front often stays where it was, too
        yield Case(f"{s} {label}", arguments, read + x.nbytes + I32 * b * (s.num_steps + 1))


def _compaction_moves(s: Serving, device: torch.device) -> Iterator[Case]:
    accept_index, slots = _accept_index(s), torch.arange(1, s.batch * s.num_draft_tokens + 1)
    dst, src = kernels.compaction_moves(accept_index, slots, backend="torch")
    named = torch.cat([dst, src]).unique()  # a node whose column is its depth moves onto itself
    arguments = {"accept_index": accept_index.to(device), "out_slots": slots.to(device)}
    yield Case(str(s), arguments, I64 * int(named.count_nonzero()) + accept_index.numel() * (I32 + 2 * I64))


def _draft_kv_indices(s: Serving, device: torch.device) -> Iterator[Case]:
    step = s.num_steps - 1
    for page_size in s.page_sizes:
        table = _Table.of(s, page_size, device)
        committed = int(table.seq_lens.sum())
        arguments = {
            "req_to_token": table.req_to_token,
            "req_pool_indices": table.req_pool_indices,
            "seq_lens": table.seq_lens,
            "topk": s.topk,
            "step": step,
            "num_steps": s.num_steps,
            "page_size": page_size,
            "seq_lens_sum": committed,
        }
        own = s.batch * s.topk * (step + 1)
        moved = I64 * (committed + own) + I64 * (s.topk * committed + own) + I64 * (2 * s.batch + s.batch * s.topk + 1)
        yield Case(f"{s} page {page_size}", arguments, moved)


def _draft_topk1(s: Serving, device: torch.device) -> Iterator[Case]:
    if s.topk > 1:
        return
    b = s.batch
    for vocabulary in s.vocabularies:
        for dtype in (torch.float32, torch.bfloat16):
            logits = _floats(b, vocabulary, device=device, dtype=dtype)
            arguments = {
                "logits": logits,
                "positions": _seq_lens(s).to(device),
                "draft_tokens": torch.zeros(b, s.num_steps, dtype=torch.int64, device=device),
                "column": 0,
            }
            moved = logits.nbytes + b * (F32 + 2 * I64 + 2 * I64)
            label = f"{s} V{vocabulary} {str(dtype).removeprefix('torch.')}"
            yield Case(label, arguments, moved)
    yield Case(f"{label}, no block", {**arguments, "draft_tokens": None}, moved - b * I64)


def _gather_rows(s: Serving, device: torch.device) -> Iterator[Case]:
    """What a chain's or a tree's next round starts from; every request goes on, in another order."""
    b = s.batch
    buffers = [
        torch.zeros(b, dtype=torch.int64, device=device),
        torch.zeros(b, s.topk, device=device),
        torch.zeros(b, s.topk, dtype=torch.int64, device=device),
        _floats(b, s.hidden, device=device, dtype=torch.bfloat16),
    ]
    arguments = {"index": torch.randperm(b, generator=_rng()).to(device), "buffers": buffers}
    yield Case(str(s), arguments, I64 * b + 2 * sum(x.nbytes for x in buffers))


def _links_from_mask(s: Serving, device: torch.device) -> Iterator[Case]:
    b, n = s.batch, s.num_draft_tokens
    mask = _tree(s)["tree_mask"].view(b, n, n)
    # Of each row, what lies between the diagonal and the node's parent, its last ancestor.
    column = torch.arange(n)
    read = int((column - torch.where(mask.tril(-1), column, 0).amax(2)).sum())
    yield Case(str(s), {"qlen_mask": mask.to(device)}, read + 3 * I64 * b * n)


def _pool(s: Serving, slots: int, device: torch.device) -> MHATokenToKVPool:
    return MHATokenToKVPool(KVLayout(s.layers, s.kv_heads, s.head_dim, torch.bfloat16), slots, device)


def _row_bytes(pool: MHATokenToKVPool) -> int:
    """Of one slot, in all layers."""
    return pool.buffer[:, 0].nbytes


def _duplicate_prefix_tail(s: Serving, device: torch.device) -> Iterator[Case]:
    short = replace(s, contexts=(17, 79))  # only the last page is looked at, and the pool takes memory in every layer
    for page_size in s.page_sizes:
        if s.topk > 1 and page_size > 1:
            table = _Table.of(short, page_size, device)
            pool = _pool(s, table.slots, device)
            arguments = {
                "pool": pool,
                "req_to_token": table.req_to_token,
                "req_pool_indices": table.req_pool_indices,
                "seq_lens": table.seq_lens,
                "topk": s.topk,
                "num_steps": s.num_steps,
                "page_size": page_size,
            }
            tails = int((table.seq_lens % page_size).sum())
            moved = tails * s.topk * (_row_bytes(pool) + I64) + 2 * I64 * s.batch
            yield Case(f"{s} page {page_size}", arguments, moved)


def _move_kv_cache(s: Serving, device: torch.device) -> Iterator[Case]:
    """What one round accepts, and whole trees."""
    for label, n in (("accepted", int(_accept_lens(s).sum())), ("all nodes", s.batch * s.num_draft_tokens)):
        pool = _pool(s, 2 * n, device)
        behind = (n + 1) // 2  # half of the targets are sources too, and no row stays where it is
        slots = torch.randperm(2 * n, generator=_rng()) + 1
        dst, src = slots[:n], slots[behind : behind + n]
        arguments = {"pool": pool, "dst": dst.to(device), "src": src.to(device)}
        yield Case(f"{s} {label}", arguments, 2 * n * (_row_bytes(pool) + I64))


def _next_roots(s: Serving, device: torch.device) -> Iterator[Case]:
    arguments = {
        "predict": torch.zeros(s.batch * s.num_draft_tokens, dtype=torch.int32, device=device),
        "accept_index": _accept_index(s).to(device),
        "accept_token_num": (_accept_lens(s) - 1).int().to(device),
        "seq_lens": _seq_lens(s).to(device),
    }
    yield Case(str(s), arguments, s.batch * (I64 + 3 * I32 + I32 + 2 * I64))


def _padded_extend_inputs(s: Serving, device: torch.device) -> Iterator[Case]:
    b, n = s.batch, s.num_draft_tokens
    arguments = {
        "seq_lens": _seq_lens(s).to(device),
        "accept_lens": _accept_lens(s).int().to(device),
        "predict": torch.zeros(b * n, dtype=torch.int32, device=device),
        "num_draft_tokens": n,
    }
    yield Case(str(s), arguments, b * (I64 + I32 + I64) + b * n * (I32 + 2 * I64))


def _ragged_extend_inputs(s: Serving, device: torch.device) -> Iterator[Case]:
    total = int(_accept_lens(s).sum())
    arguments = {
        "seq_lens": _seq_lens(s).to(device) + s.num_steps + 1,
        "accept_lens": _accept_lens(s).int().to(device),
        "accept_tokens": torch.zeros(total, dtype=torch.int32, device=device),
    }
    yield Case(str(s), arguments, I64 * total + s.batch * (I64 + I32 + I32 + 2 * I64))


def _paged_kv_indices(s: Serving, device: torch.device) -> Iterator[Case]:
    table = _Table.of(s, 1, device)
    tail_slots = torch.arange(s.batch * s.num_draft_tokens, device=device).view(s.batch, -1)
    slots = int(table.seq_lens.sum()) + tail_slots.numel()
    arguments = {
        "req_to_token": table.req_to_token,
        "req_pool_indices": table.req_pool_indices,
        "prefix_lens": table.seq_lens,
        "tail_slots": tail_slots,
        "room": slots,
    }
    yield Case(f"{s} verify", arguments, 2 * I64 * slots + I64 * (3 * s.batch + 1))


def _rotate_input_ids(s: Serving, device: torch.device) -> Iterator[Case]:
    """The windows of a round, and the prompts of a prefill."""
    if s.topk > 1:
        return
    for label, lens, last in (
        ("round", torch.full((s.batch,), s.num_draft_tokens), _accept_lens(s) - 1),
        ("prefill", _seq_lens(s), _seq_lens(s) - 1),
    ):
        starts = lens.cumsum(0) - lens
        arguments = {
            "input_ids": torch.zeros(int(lens.sum()), dtype=torch.int64, device=device),
            "starts": starts.to(device),
            "lens": lens.to(device),
            "new_tokens": torch.zeros(s.batch, dtype=torch.int64, device=device),
            "last_rows": (starts + last).to(device),
        }
        # A row before the last that counts is read and written once; what is behind it need not be moved.
        yield Case(f"{s} {label}", arguments, 2 * I64 * int(last.sum()) + 5 * I64 * s.batch)


def _stable_topk(s: Serving, device: torch.device) -> Iterator[Case]:
    b, k = s.batch, s.topk
    pool = k + (s.num_steps - 1) * k * k
    rows = [(f"V{vocabulary}", b * k, vocabulary, k) for vocabulary in s.vocabularies]
    if k > 1:
        rows += [("beams", b, k * k, k), ("the pool", b, pool, s.num_draft_tokens - 1)]
    for label, count, width, best in rows:
        arguments = {"values": _floats(count, width, device=device), "k": best}
        yield Case(f"{s} {label}", arguments, count * (F32 * width + (F32 + I64) * best))


def _tree_attention(s: Serving, device: torch.device) -> Iterator[Case]:
    """Verification, and, with bfloat16 alone, one with a mask of all keys, and one draft forward."""
    b, n = s.batch, s.num_draft_tokens
    table = _Table.of(s, 1, device)
    lens = table.seq_lens + n
    rows = table.req_to_token[table.req_pool_indices]
    indices = rows[torch.arange(rows.shape[1], device=device) < lens[:, None]]
    indptr = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
    mask = _tree(s)["tree_mask"].to(device)
    for dtype, dim in ATTENTION_FORMS if s.topk > 1 and b > 1 and n <= 32 else ATTENTION_FORMS[:1]:
        head_dim = dim or s.head_dim
        label = f"{s} verify {str(dtype).removeprefix('torch.')} dim {head_dim}"
        yield _attention_case(s, label, table, n, indptr, indices, mask, dtype, head_dim)
    if s.topk > 1 and b > 1 and n <= 32:
        full = _tree(s, "full")["tree_mask"].to(device)
        label = f"{s} verify, a mask of all keys"
        yield _attention_case(s, label, table, n, indptr, indices, full, torch.bfloat16, s.head_dim)
    branch_indptr, branch_indices = kernels.draft_kv_indices(
        table.req_to_token,
        table.req_pool_indices,
        table.seq_lens,
        s.topk,
        0,
        num_steps=s.num_steps,
        backend="torch",
    )
    all_true = torch.ones(b * s.topk, dtype=torch.bool, device=device)
    yield _attention_case(
        s, f"{s} draft", table, 1, branch_indptr, branch_indices, all_true, torch.bfloat16, s.head_dim
    )


ATTENTION_FORMS: tuple[tuple[torch.dtype, int], ...] = (
    (torch.bfloat16, 0),  # 0: the server's own head dimension
    (torch.float16, 64),
    (torch.float16, 256),
    (torch.bfloat16, 256),
    (torch.float32, 16),
    (torch.float32, 256),
    (torch.float64, 128),
    (torch.float64, 256),
)


def _attention_case(
    s: Serving,
    label: str,
    table: _Table,
    nodes: int,
    indptr: Tensor,
    indices: Tensor,
    mask: Tensor,
    dtype: torch.dtype,
    head_dim: int,
) -> Case:
    sequences = len(indptr) - 1
    cache = _floats(table.slots, 2, s.kv_heads, head_dim, device=indices.device, dtype=dtype)
    q = _floats(sequences * nodes, s.heads, head_dim, device=indices.device, dtype=dtype)
    arguments = {
        "q": q,
        "k_cache": cache[:, 0],
        "v_cache": cache[:, 1],
        "kv_indptr": indptr,
        "kv_indices": indices,
        "tree_mask": mask,
        "scale": head_dim**-0.5,
    }
    # A slot that several branches attend to has to be read once.
    read = len(indices.unique())
    moved = read * cache[0].nbytes + indices.nbytes + 2 * q.nbytes + mask.nbytes + indptr.nbytes
    return Case(label, arguments, moved)


def _tree_sampling_target_only(s: Serving, device: torch.device) -> Iterator[Case]:
    b, n = s.batch, s.num_draft_tokens
    for vocabulary in s.vocabularies:
        arguments = {
            **_walkable(s, device),
            "target_probs": _laws(b, n, vocabulary, device=device),
            "coins": _floats(b, n, device=device),
            "final_coins": _floats(b, device=device),
            "num_steps": s.num_steps,
        }
        yield Case(f"{s} V{vocabulary}", arguments, F32 * b * vocabulary)
    yield Case(f"{s} V{vocabulary}, one coin", {**arguments, "reuse_coin": True}, F32 * b * vocabulary)


def _verify_tree_greedy(s: Serving, device: torch.device) -> Iterator[Case]:
    """A target that agrees with every node's first child, so that walks go as deep as the trees."""
    b, n = s.batch, s.num_draft_tokens
    walkable = _walkable(s, device)
    choice = walkable["candidates"].gather(1, walkable["retrieve_next_token"].clamp(min=0))
    arguments: dict[str, Any] = {**walkable, "target_predict": choice, "num_steps": s.num_steps}
    accepted = kernels.verify_tree_greedy(**arguments, backend="torch")[2]
    # On the way: each node's row and target; the first child, while there are steps left; and its token.
    read = I64 * int((2 * (accepted + 1) + (accepted + 1).clamp(max=s.num_steps) + accepted).sum())
    yield Case(str(s), arguments, read + I32 * b * (n + s.num_steps + 2))


def _widened_extend_inputs(s: Serving, device: torch.device) -> Iterator[Case]:
    front, n = s.num_steps - 1, s.num_draft_tokens
    if s.topk > 1:
        return
    table = _Table.of(s, 1, device)
    hidden_states = _floats(s.batch * n, s.hidden, device=device, dtype=torch.bfloat16)
    arguments = {
        "seq_lens": table.seq_lens,
        "predict": torch.zeros(s.batch * n, dtype=torch.int32, device=device),
        "hidden_states": hidden_states,
        "req_to_token": table.req_to_token,
        "req_pool_indices": table.req_pool_indices,
        **_boundary_pool(s, front, device),
        "num_draft_tokens": n,
    }
    moved = s.batch * (front + n) * (2 * hidden_states[0].nbytes + 4 * I64)
    yield Case(str(s), arguments, moved + s.batch * (front * I64 + n * I32 + 3 * I64))


CASES: dict[str, Callable[[Serving, torch.device], Iterator[Case]]] = {
    "align_evict_mask_to_page_size": _align_evict_mask_to_page_size,
    "append_boundary_rows": _append_boundary_rows,
    "assign_draft_cache_locs": _assign_draft_cache_locs,
    "assign_extend_cache_locs": _assign_extend_cache_locs,
    "assign_req_to_token": _assign_req_to_token,
    "build_chain_tree": _build_chain_tree,
    "build_tree": _build_tree,
    "chain_rejection_sampling": _chain_rejection_sampling,
    "compact_to_front": _compact_to_front,
    "compaction_moves": _compaction_moves,
    "draft_kv_indices": _draft_kv_indices,
    "draft_topk1": _draft_topk1,
    "duplicate_prefix_tail": _duplicate_prefix_tail,
    "gather_rows": _gather_rows,
    "links_from_mask": _links_from_mask,
    "move_kv_cache": _move_kv_cache,
    "next_roots": _next_roots,
    "padded_extend_inputs": _padded_extend_inputs,
    "paged_kv_indices": _paged_kv_indices,
    "ragged_extend_inputs": _ragged_extend_inputs,
    "rotate_input_ids": _rotate_input_ids,
    "stable_topk": _stable_topk,
    "tree_attention": _tree_attention,
    "tree_sampling_target_only": _tree_sampling_target_only,
    "verify_tree_greedy": _verify_tree_greedy,
    "widened_extend_inputs": _widened_extend_inputs,
}
