"""Multi-layer EAGLE: several MTP layers, one for each token ahead, all of them run inside the extend.

`models/mtp.py` says what such layers are: at row p layer i is fed token p + 1 + i beside the hidden state of layer
i - 1 (layer 0: of the target) at row p, and foresees token p + 2 + i. So the whole chain of S guesses comes out of the
last rows of S extend forwards, layer after layer, and there is no draft loop: k = 1, N = S + 1, and nothing is
reserved.

**Rows that were fed guesses.** A row of layer i needs i tokens more than are known at the text's end. At the newest i
positions it is fed guesses, those of the layers before it, and its keys and values there are what the layer thinks of a
text that may never come. They are good enough for the guesses of this round. In the next one the tokens are known, and
the rows are written anew: each extend begins S - 1 rows before the new ones, `front` in the code. What goes in there is
the tokens, and the target's hidden states, which are kept for the newest S - 1 rows of each request. So of every layer
all rows are right but for the newest S - 1, and these are never shared:

- `written_len` stops S - 1 rows before the end.
- A row of the last layer depends on S tokens after its own (`reads_ahead`), and they are all part of the prefix cache's
  key. A request that finds a prefix there finds rows that were fed its own tokens, in every layer, and does not write
  to them.
- Chunks of a prompt go the same way: guesses are fed at a chunk's end, and the next chunk begins S - 1 rows before it.

A round costs one target forward and S draft forwards, as EAGLE's. Each layer has a pool of its own over the same slots.

Source: SGLang: python/sglang/srt/speculative/multi_layer_eagle_worker_v2.py:MultiLayerEagleWorkerV2 @0.5.23. There the
window of S - 1 rows is on for some models only (else the rows stay as they were guessed), and keys of the prefix cache
are pairs, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import Candidates, CommitOutput, DraftInput, ForwardOutput, VerifyInput, VerifyOutput
from refspec.kernels import rotate_input_ids
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import Request, RunningBatch
from refspec.runtime.rows import causal_batch, positions_from
from refspec.runtime.runner import ModelRunner
from refspec.spec.draft import propose
from refspec.workers.base import Stats
from refspec.workers.eagle_v1 import SpecWorker


class MultiLayerWorker(SpecWorker):
    """A target and S MTP layers over one set of slots. See the module's docstring."""

    def __init__(
        self,
        target: ModelRunner,
        layers: Sequence[ModelRunner],
        allocator: SlotAllocator,
        stats: Stats,
        config: SpecConfig,
    ) -> None:
        super().__init__(target, allocator, stats, config)
        self.layers, self.front = list(layers), len(layers) - 1
        self.reads_ahead = len(layers)
        self.kept: Tensor | None = None  # (rows of the request table, front, H) target hidden states, the newest last

    @property
    def runners(self) -> list[ModelRunner]:
        return [self.target, *self.layers]

    def written_len(self, request: Request) -> int:
        """All but the rows that were fed guesses."""
        if request.finish_reason:
            return request.written_len
        return max(request.cached_len, request.kv_len - self.front)

    def read_prompt(self, batch: RunningBatch, out: ForwardOutput, slots: Tensor) -> RunningBatch:
        batch, index = batch.after_extend()
        batch.draft_input = self._guess(batch, out.hidden_states[index], batch.extend_lens, "prefill_draft")
        return batch

    def draft(self, batch: RunningBatch) -> Candidates:
        """All guesses are there already."""
        start = batch.draft_input
        assert start is not None
        self.chain.fits(batch, self.config)  # it does: this makes the constants
        tokens, scores = start.topk_index.split(1, dim=1), start.topk_p.cumprod(dim=1).split(1, dim=1)
        no_slots = start.topk_index.unsqueeze(1)[:, :, :0]
        return self.chain.candidates(list(tokens), list(scores), no_slots, start.draft_probs)

    def make_tree(self, batch: RunningBatch, candidates: Candidates | None) -> VerifyInput:
        assert candidates is not None
        self.stats.chain_rounds += 1 if batch.requests else 0
        return self.chain.make_tree(batch, candidates)

    def extend(self, batch: RunningBatch, verified: VerifyOutput, done: CommitOutput) -> RunningBatch:
        going_on = batch.going_on()
        kept = [row for r in going_on for row in done.kept_rows[r]]
        new_lens = [done.accept_lens[r] for r in going_on]
        batch, _ = batch.after_round(verified, done)
        rows = torch.tensor(kept, dtype=torch.int64, device=batch.rows.device)
        batch.draft_input = self._guess(batch, verified.hidden_states[rows], new_lens, "extend")
        return batch

    def empty_draft_input(self) -> DraftInput:
        ids = torch.zeros(0, len(self.layers), dtype=torch.int64, device=self.target.device)
        laws = torch.zeros(*ids.shape, self.target.vocab_size, device=ids.device)
        return DraftInput(ids.float(), ids, ids[:, :0], laws if self.config.drafts_are_drawn else None)

    def _guess(self, batch: RunningBatch, hidden_states: Tensor, new_lens: list[int], phase: str) -> DraftInput:
        """All layers over the newest new_lens[r] cached tokens of each request, and the front rows before them.

        hidden_states (n, H): the target's at the new tokens, whose slots stand in the request table. Returns the chain:
        probabilities f32 (b, S), ids i64 (b, S), and, where they are drawn, the laws f32 (b, S, V).
        """
        requests, device = batch.requests, batch.rows.device
        new_starts = [request.kv_len - new for request, new in zip(requests, new_lens, strict=True)]
        starts = [max(r.cached_len, start - self.front) for r, start in zip(requests, new_starts, strict=True)]
        lens = [request.kv_len - start for request, start in zip(requests, starts, strict=True)]
        ids = [
            token for r, start in zip(requests, starts, strict=True) for token in r.all_ids[start + 1 : r.kv_len + 1]
        ]
        request_of = [r for r, length in enumerate(lens) for _ in range(length)]
        input_ids, of = torch.tensor([ids, request_of], dtype=torch.int64, device=device)
        slots = batch.req_to_token[batch.rows[of], positions_from(starts, lens, device)]
        row_lens = torch.tensor(lens, dtype=torch.int64, device=device)
        last_rows = row_lens.cumsum(0) - 1

        rows = causal_batch(input_ids, slots, lens, batch.req_to_token, batch.rows, starts)
        rows.hidden_states = self._with_front(batch, hidden_states, new_lens, lens, last_rows)
        chain: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for i, layer in enumerate(self.layers):
            if i:
                guesses = chain[-1][1].squeeze(1)
                rotate_input_ids(input_ids, last_rows + 1 - row_lens, row_lens, guesses, last_rows)
            out = layer.forward(rows, phase, last_rows)
            chain.append(propose(batch, out.logits, i, self.config, layer))
            rows.hidden_states = out.hidden_states
        topk_p, topk_index, laws = zip(*chain, strict=True)
        drawn_from = [law for law in laws if law is not None]
        return DraftInput(
            torch.cat(topk_p, dim=1),
            torch.cat(topk_index, dim=1),
            hidden_states.new_zeros(len(batch), 0),  # nothing goes on from there
            torch.stack(drawn_from, dim=1) if drawn_from else None,
        )

    def _with_front(
        self, batch: RunningBatch, hidden_states: Tensor, new_lens: list[int], lens: list[int], last_rows: Tensor
    ) -> Tensor:
        """The target's hidden states of the front rows before those of the new ones (n, H); the newest are kept."""
        width, front = hidden_states.shape[1], self.front
        if self.kept is None:
            self.kept = hidden_states.new_zeros(len(batch.req_to_token), front, width)
        old_and_new = torch.cat([self.kept[batch.rows].flatten(0, 1), hidden_states])
        index, new_row = list[int](), len(batch) * front
        for r, (new, length) in enumerate(zip(new_lens, lens, strict=True)):
            index += range((r + 1) * front - (length - new), (r + 1) * front)
            index += range(new_row, new_row + new)
            new_row += new
        found = old_and_new[torch.tensor(index, dtype=torch.int64, device=hidden_states.device)]
        # Of a request with fewer rows so far, those in front are others'; nobody asks for them.
        newest = last_rows.unsqueeze(1) + torch.arange(1 - front, 1, device=last_rows.device)
        self.kept[batch.rows] = found[newest.clamp(min=0)]
        return found
