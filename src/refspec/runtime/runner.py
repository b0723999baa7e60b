"""One model over the KV pool: the only place where a forward happens, and where it is counted.

Prefill, decode, draft step, tree verify and extend all come through `ModelRunner.forward`, and through one
attention with an explicit mask. What sets them apart is in the ForwardBatch.

There are two ways to attend. PoolAttention gathers the keys and values that a forward reads into one dense tensor, for
torch's attention: on a CPU nothing is faster. PagedAttention leaves them where they are, for the Triton kernel. That
kernel shows every row all committed tokens, so pools of which some layer does not (a sliding window, a sparse choice),
and those with rows too wide for it, are gathered on a GPU, too: `TokenToKVPool.paged`.

Source: SGLang: python/sglang/srt/model_executor/model_runner.py:ModelRunner.forward @v0.5.5; the attention backends
beside it, torch's and Triton's, play the parts of PoolAttention and PagedAttention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from refspec.contracts import ForwardBatch, ForwardOutput
from refspec.kernels import paged_kv_indices, tree_attention
from refspec.kernels.backend import resolve_backend
from refspec.kernels.move_kv_cache import check_layers
from refspec.memory.kv_pool import DSATokenToKVPool, PoolLayout, SWAKVPool, TokenToKVPool


class ModelConfig(Protocol):
    """The part of a model's configuration that the engine reads."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class ServedModel(Protocol):
    """What the engine asks of a model, target or draft: LlamaForCausalLM, EagleHead, ScriptedModel, ...

    A draft whose vocabulary is smaller than its target's also has draft_to_target: i64 (draft ids), the target's id
    for each of its own. Its config.vocab_size is the target's, its logits have a column for each of its own.

    A model may also say `recurrent_state = True`: it keeps a state that each row of a request takes over from the row
    before it, whatever the mask shows, so its rows must be one path. The engine then refuses a topk above 1. With one
    branch it is served as any other, if the state after each token is kept in the token's slot: a rejected draft, a
    shared prefix and a retraction are matters of slots.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def kv_layout(self) -> PoolLayout: ...
    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: PoolAttention | PagedAttention,
        hidden_states: Tensor | None,
    ) -> Tensor:
        """Hidden states (n, hidden_size) of the rows."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(n, hidden_size) -> (n, vocab_size)."""


class PoolAttention:
    """The attention of one forward: writes the rows' keys and values to their slots, then reads through the mask.

    A model calls it once per layer. Columns are the request's prefix slots, then its tail slots.

    selection: i64 (n, layers, topk), the slots that each row chose, 0 for none; None where nobody asked for them.
    """

    def __init__(self, batch: ForwardBatch, pool: TokenToKVPool) -> None:
        self.batch, self.pool, self.out_slots = batch, pool, batch.out_slots
        self.padding = RowPadding(batch.q_lens, batch.input_ids.device)
        prefix_slots, prefix_mask = _committed_only(batch)
        self.columns = torch.cat([prefix_slots, batch.tail_slots], dim=1)  # (b, L)
        self.visible = _visible_columns(batch, prefix_mask)  # bool (b, Q, L); None: everything
        # By window, (b, 1, Q, L): -inf where a row does not see, in the dtype of the queries. None: it sees everything.
        self.biases: dict[int | None, Tensor | None] = {}
        self.selected_slots: list[Tensor] = []  # of each layer, (b, Q, topk)

    def __call__(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        selected: Tensor | None = None,
    ) -> Tensor:
        """q (n, heads, dim); k (n, kv_heads, dim), v (n, kv_heads, width) -> (n, heads, width).

        scale: of q·k; None: dim ** -0.5. selected: as `select` gives it, what the rows are to attend and nothing else.
        """
        self.pool.write(layer_id, self.out_slots, k, v)
        if isinstance(self.pool, SWAKVPool):
            self.pool.write_positions(self.out_slots, self.batch.positions)
        return self.read_only(layer_id, q, scale, selected)

    def read_only(self, layer_id: int, q: Tensor, scale: float | None = None, selected: Tensor | None = None) -> Tensor:
        """As a call, but nothing is written: the rows bring no keys and values."""
        keys, values = self.pool.read(layer_id, self.columns)
        window = self.pool.window(layer_id)
        if selected is not None:
            bias: Tensor | None = _bias_of(selected, q.dtype)
        elif window in self.biases:
            bias = self.biases[window]
        else:
            seen = self.visible if window is None else self._within(window)
            bias = self.biases[window] = None if seen is None else _bias_of(seen, q.dtype)
        out = F.scaled_dot_product_attention(
            self._by_request(q).transpose(1, 2), keys, values, attn_mask=bias, scale=scale, enable_gqa=True
        )
        return self.padding.unpad(out.transpose(1, 2).flatten(0, 1))

    def select(self, layer_id: int, q: Tensor, k: Tensor, weights: Tensor, topk: int, keep: bool = False) -> Tensor:
        """For sparse attention: store the rows' index keys, and choose the topk columns that each row will attend.

        q (n, heads, dim), k (n, dim), weights (n, heads). A column scores sum over heads of weight · relu(q · k). Many
        score 0 to the bit; of equal ones the first columns are taken, which along a path are the first positions, in
        a tree as in plain decoding. A row that sees no more than topk columns takes them all.

        Where the batch carries a choice, made by an earlier forward, nothing is scored: that is what is attended, and
        the tail beside it. The keys are stored all the same, since a later forward will score them.

        keep: make the choice part of `selection`. Returns bool (b, Q, L).
        """
        assert isinstance(self.pool, DSATokenToKVPool)
        self.pool.write_index(layer_id, self.out_slots, k)
        visible = self._all_visible()
        if self.batch.selection is not None:
            carried = (self.columns[:, :, None] == self.batch.selection[:, None, layer_id]).any(2)
            carried[:, self.columns.shape[1] - self.batch.tail_slots.shape[1] :] = True
            return carried[:, None] & visible
        keys = self.pool.read_index(layer_id, self.columns)
        scores = torch.einsum("bqhd,bld->bqhl", self._by_request(q), keys).relu()
        scores = torch.einsum("bqhl,bqh->bql", scores, self._by_request(weights)).masked_fill(~visible, -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
        selected = torch.zeros_like(visible).scatter_(2, best, True) & visible
        if keep:
            slots = self.columns[:, None].expand_as(visible).gather(2, best).where(visible.gather(2, best), 0)
            self.selected_slots.append(F.pad(slots, (0, topk - best.shape[2])))
        return selected

    @property
    def selection(self) -> Tensor | None:
        if not self.selected_slots:
            return None
        return self.padding.unpad(torch.stack(self.selected_slots, dim=2).flatten(0, 1))

    def _within(self, window: int) -> Tensor:
        """bool (b, Q, L): of what the rows see, what stands less than `window` positions behind their own."""
        assert isinstance(self.pool, SWAKVPool)
        column_positions = self.pool.positions[self.columns, 0]
        behind = self._by_request(self.batch.positions)[:, :, None] - column_positions[:, None]
        return self._all_visible() & (behind < window)

    def _by_request(self, x: Tensor) -> Tensor:
        """(n, ...) -> (b, Q, ...)."""
        return self.padding.pad(x).view(self.padding.batch_size, self.padding.rows, *x.shape[1:])

    def _all_visible(self) -> Tensor:
        """The visible columns, bool (b, Q, L), also where that is everything."""
        if self.visible is not None:
            return self.visible
        b, columns = self.columns.shape
        return torch.ones(b, self.padding.rows, columns, dtype=torch.bool, device=self.columns.device)

    def look_up(self, records: Tensor) -> list[Tensor]:
        """For a model without attention: keep the rows' records (n, w); for each row, those that it sees (seen, w)."""
        self.pool.write(0, self.out_slots, records[:, None], records[:, None])
        kept, _ = self.pool.read(0, self.columns)  # (b, 1, L, w)
        per_row = self.padding.unpad(kept.expand(-1, self.padding.rows, -1, -1).flatten(0, 1))
        seen_by_row = self.padding.unpad(self._all_visible().flatten(0, 1))
        return list(per_row[seen_by_row].split(seen_by_row.sum(1).tolist()))


class PagedAttention:
    """As PoolAttention, but by the operation `tree_attention`, which reads keys and values in their slots.

    The pool must be one for that: pool.paged.

    What all layers need, the slots of each request's columns and the mask, is made once.

    lens: i64 (b), batch.prefix_lens on the device. Where it is given, nothing here depends on what they are, as a CUDA
    graph demands that is captured once and replayed for any: buffers have room for the longest context.
    """

    def __init__(self, batch: ForwardBatch, pool: TokenToKVPool, lens: Tensor | None = None) -> None:
        self.batch, self.pool = batch, pool
        self.padding = RowPadding(batch.q_lens, batch.input_ids.device)
        (b, tail), longest = batch.tail_slots.shape, batch.req_to_token.shape[1]
        self.max_keys = None if lens is None else longest + tail
        room = sum(batch.prefix_lens) + b * tail if lens is None else b * (longest + tail)
        if lens is None:
            lens = lens_of(batch)
            if batch.lens is not None:  # then prefix_lens are bounds, and there may be more room than keys
                self.max_keys = max(batch.prefix_lens) + tail
        self.kv_indptr, self.kv_indices = paged_kv_indices(batch.req_to_token, batch.rows, lens, batch.tail_slots, room)
        if batch.tail_mask is None:  # as of a tail of one column, or of none
            columns = self.padding.batch_size * self.padding.rows * min(tail, 1)
            self.tree_mask = torch.ones(columns, dtype=torch.bool, device=batch.input_ids.device)
        else:
            self.tree_mask = batch.tail_mask.contiguous().flatten()  # one mask may stand for all requests

    def __call__(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """q (n, heads, dim); k (n, kv_heads, dim), v (n, kv_heads, width) -> (n, heads, width).

        scale: of q·k; None: dim ** -0.5.
        """
        self.pool.write(layer_id, self.batch.out_slots, k, v)
        return self.read_only(layer_id, q, scale)[..., : v.shape[-1]]

    def read_only(self, layer_id: int, q: Tensor, scale: float | None = None) -> Tensor:
        """As PoolAttention's, of values as wide as the keys."""
        k_cache, v_cache = self.pool.in_place(layer_id)
        out = tree_attention(
            self.padding.pad(q),
            k_cache,
            v_cache,
            self.kv_indptr,
            self.kv_indices,
            self.tree_mask,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            max_keys=self.max_keys,
        )
        return self.padding.unpad(out)

    selection = None  # whoever chooses is gathered

    def look_up(self, records: Tensor) -> list[Tensor]:
        """As PoolAttention's: a model without attention has nothing for a kernel to do."""
        return PoolAttention(self.batch, self.pool).look_up(records)


class RowPadding:
    """Requests with unequal numbers of rows, made equal: each gets as many as the longest has, zeros at the end.

    rows: so many for each, if given, and none may have more.
    """

    def __init__(self, q_lens: list[int], device: torch.device, rows: int | None = None) -> None:
        self.batch_size, self.rows = len(q_lens), rows or max(q_lens, default=0)
        self.places: Tensor | None = None  # (n) where row i stands among the b·Q; None: there is nothing to pad
        if min(q_lens, default=self.rows) < self.rows:
            starts = range(0, self.batch_size * self.rows, self.rows)
            self.places = torch.cat(
                [torch.arange(start, start + length) for start, length in zip(starts, q_lens, strict=True)]
            ).to(device)

    def pad(self, x: Tensor) -> Tensor:
        """(n, ...) -> (b·Q, ...)."""
        if self.places is None:
            return x
        return x.new_zeros(self.batch_size * self.rows, *x.shape[1:]).index_copy_(0, self.places, x)

    def unpad(self, x: Tensor) -> Tensor:
        """(b·Q, ...) -> (n, ...)."""
        return x if self.places is None else x.index_select(0, self.places)


class ModelRunner:
    """A model and its KV pool, of `slots` slots in pages of page_size.

    forwards: counts this runner's, by the phase that each was made for.
    vocab_size: ids at or above it are never proposed. It is smaller than the model's own where the rows of the
    output head were padded beyond the tokenizer's size: their logits mean nothing.
    draft_to_target: i64, the id that each column of the logits stands for; None: column i stands for id i. See
    ServedModel. Columns for ids that are never proposed are left out of both.
    pool: another runner's, for a model that reads what that one's keeps (models/frozen_kv.py); None: its own.
    shared_head: where the output head is spread over several ranks (engine/dp.py), what takes the place of the model's
    own: (hidden states (n, H), phase) -> logits (n, V). It is asked in every forward, for zero rows too.

    Raises ValueError for a kind of pool whose slots cannot be moved.
    """

    def __init__(
        self,
        model: ServedModel,
        slots: int,
        device: torch.device,
        forwards: Counter[str],
        vocab_size: int | None = None,
        page_size: int = 1,
        pool: TokenToKVPool | None = None,
    ) -> None:
        self.model, self.device, self.forwards = model, device, forwards
        self.pool = pool or model.kv_layout.make_pool(slots, device, page_size)
        check_layers(self.pool.layers)  # what cannot be moved must not wait for its first accepted branch to say so
        self.vocab_size = vocab_size or model.config.vocab_size
        self.draft_to_target: Tensor | None = getattr(model, "draft_to_target", None)
        self.columns: Tensor | None = None  # of the logits, that are kept; None: the first vocab_size
        if self.draft_to_target is not None:
            self.columns = (self.draft_to_target < self.vocab_size).nonzero().flatten()
            self.draft_to_target = self.draft_to_target[self.columns]
        self.shared_head: Callable[[Tensor, str], Tensor] | None = None

    @property
    def choices(self) -> int:
        """Columns of its logits: ids that can be proposed."""
        return self.vocab_size if self.draft_to_target is None else len(self.draft_to_target)

    @torch.inference_mode()  # a tenth of the time on a CPU: no torch operation keeps books for a gradient
    def forward(self, batch: ForwardBatch, phase: str, logits_rows: Tensor | None = None) -> ForwardOutput:
        """Run the rows; logits for `logits_rows` (indices into the n rows), or for all of them.

        Afterwards the pool holds the rows' keys and values at out_slots. With zero rows (an idle rank) the model
        is not run, the outputs have zero rows, and nothing is counted; a shared head is asked all the same.
        """
        if not batch.q_lens:
            hidden = torch.zeros(0, self.model.config.hidden_size, dtype=self.model.kv_layout.dtype, device=self.device)
            if self.shared_head:
                return ForwardOutput(self._proposable(self.shared_head(hidden, phase)), hidden)
            return ForwardOutput(hidden.new_zeros(0, self.choices), hidden)
        self.forwards[phase] += 1
        return self.run(batch, phase, logits_rows)

    def run(self, batch: ForwardBatch, phase: str, logits_rows: Tensor | None) -> ForwardOutput:
        """The forward itself, of one row or more. Here as it comes; graphs.GraphRunner replays what it has recorded."""
        return self.run_eagerly(batch, phase, logits_rows)

    def run_eagerly(
        self, batch: ForwardBatch, phase: str, logits_rows: Tensor | None, lens: Tensor | None = None
    ) -> ForwardOutput:
        """Operation by operation. lens: as of PagedAttention."""
        paged = self.pool.paged and resolve_backend("auto", self.device) == "triton"
        attend = PagedAttention(batch, self.pool, lens) if paged else PoolAttention(batch, self.pool)
        hidden_states = self.model(batch.input_ids, batch.positions, attend, batch.hidden_states)
        read = hidden_states if logits_rows is None else hidden_states.index_select(0, logits_rows)
        logits = self.shared_head(read, phase) if self.shared_head else self.model.logits(read)
        selection = attend.selection
        if selection is not None and logits_rows is not None:
            selection = selection.index_select(0, logits_rows)
        return ForwardOutput(self._proposable(logits), hidden_states, selection)

    def _proposable(self, logits: Tensor) -> Tensor:
        """The columns of ids below vocab_size."""
        return logits[:, : self.vocab_size] if self.columns is None else logits.index_select(1, self.columns)


def greedy_choice(logits: Tensor) -> Tensor:
    """logits (n, V) -> the likeliest ids, i64 (n), ties to the lowest: the one rule for prefill, decode and verify.

    Raises ValueError where a row has no likeliest: then the weights or the configuration are no good.
    """
    best, finite = likeliest(logits)
    require_finite_logits(finite)
    return best


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and whether every row has a likeliest, bool (): left on the device for somebody else to look at."""
    best = logits.max(dim=-1)
    return best.indices, best.values.isfinite().all()


def require_finite_logits(finite: Tensor) -> None:
    """Raises ValueError unless every row of the target's logits had a likeliest."""
    if not bool(finite):
        raise ValueError("the target's logits are NaN or infinite: its weights or its config.json are no good")


def _bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """bool (b, Q, L) -> (b, 1, Q, L), -inf where a row does not see and 0 elsewhere."""
    unseen = ~seen.unsqueeze(1)
    return torch.zeros(unseen.shape, dtype=dtype, device=seen.device).masked_fill_(unseen, -torch.inf)


def _prefix_slots(batch: ForwardBatch) -> Tensor:
    """i64 (b, longest prefix). Beyond a request's own prefix they are stale."""
    return batch.req_to_token[batch.rows, : max(batch.prefix_lens)]


def lens_of(batch: ForwardBatch) -> Tensor:
    """i64 (b): the lengths of the prefixes, on the device."""
    if batch.lens is not None:
        return batch.lens
    return torch.tensor(batch.prefix_lens, dtype=torch.int64, device=batch.rows.device)


def _committed_only(batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
    """The prefix slots, and bool (b, 1, P) where they hold committed tokens; None where all of them do.

    Stale columns are pointed at the dummy slot. Hiding them is not enough: who knows whose keys and values a stale
    slot holds by now, and a weight of 0 does not silence a NaN.
    """
    slots, width = _prefix_slots(batch), max(batch.prefix_lens)
    if batch.lens is None and min(batch.prefix_lens) == width:
        return slots, None
    committed = torch.arange(width, device=slots.device) < lens_of(batch)[:, None]
    return slots.where(committed, 0), committed[:, None]


def _visible_columns(batch: ForwardBatch, prefix_mask: Tensor | None) -> Tensor | None:
    """bool (b, Q, L): the committed prefix, then the tail mask; None where every row sees every column.

    A padded row sees what its neighbours do, so that its softmax has something to work on.
    """
    prefix, tail = prefix_mask, batch.tail_mask
    if prefix is None and tail is None:
        return None
    b, rows, device = len(batch.q_lens), max(batch.q_lens), batch.tail_slots.device
    if prefix is None:
        prefix = torch.ones(b, 1, max(batch.prefix_lens), dtype=torch.bool, device=device)
    if tail is None:
        tail = torch.ones(b, rows, batch.tail_slots.shape[1], dtype=torch.bool, device=device)
    return torch.cat([prefix.expand(-1, rows, -1), tail], dim=-1)
