"""One speculative round, from the draft's first guess to its next: the readable worker.

`EagleWorkerV1._round` is the whole story, one call for each phase; each phase is a file of `spec/`. A round costs
one target forward and S draft forwards: S - 1 in the loop and one in the extend.

In SGLang the class of this name *is* the draft worker and holds the target; here a worker holds the runners of
both.

Source: SGLang: python/sglang/srt/speculative/eagle_worker.py:EAGLEWorker.forward_batch_speculative_generation
@v0.4.6
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refspec.config import SpecConfig
from refspec.contracts import DraftInput, ForwardMode
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.spec.commit import commit
from refspec.spec.draft import draft
from refspec.spec.extend import extend_after_prefill, extend_after_verify
from refspec.spec.tree import make_tree
from refspec.spec.verify import verify
from refspec.workers.base import Observer, Stats, Worker
from refspec.workers.recorder import RoundRecorder


class EagleWorkerV1(Worker):
    """Target and EAGLE-style draft over one set of slots."""

    def __init__(
        self, target: ModelRunner, draft: ModelRunner, allocator: SlotAllocator, stats: Stats, config: SpecConfig
    ) -> None:
        super().__init__(target, allocator, stats)
        self.draft, self.config = draft, config

    reads_ahead = True

    def slots_for_round(self, kv_lens: Sequence[int]) -> int:
        """The draft's slots are back before the tree's are taken, so it is the larger number of the two."""
        drafts = self.allocator.slots_to_extend(kv_lens, [self.config.draft_end(kv_len) for kv_len in kv_lens])
        trees = self.allocator.slots_to_extend(kv_lens, [self.config.tree_end(kv_len) for kv_len in kv_lens])
        return max(drafts, trees)

    # region forward_modes
    def forward(self, batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
        if mode is ForwardMode.EXTEND:
            return self._prefill(batch)
        if mode is ForwardMode.IDLE:
            batch.draft_input = self._empty_draft_input()
        return self._round(batch, observer)

    # endregion forward_modes

    def _prefill(self, batch: RunningBatch) -> RunningBatch:
        """The target reads the prompts, then the draft does, on the target's hidden states."""
        with self.phase("prefill"):
            out, slots = self.prefill_target(batch)
            return extend_after_prefill(batch, out.hidden_states, slots, self.draft, self.config)

    # region one_round
    def _round(self, batch: RunningBatch, observer: Observer | None) -> RunningBatch:
        recorder = RoundRecorder(self.stats, self.config) if observer else None
        with self.phase("draft"):
            candidates = draft(batch, self.draft, self.allocator, self.config)
        with self.phase("tree"):
            tree = make_tree(batch, candidates, self.config)
        with self.phase("verify"):
            verified = verify(batch, tree, self.target, self.allocator, self.config)
        with self.phase("commit"):
            done = commit(batch, verified, self.target, self.allocator, self.config)
        with self.phase("extend"):
            going_on = extend_after_verify(batch, verified, done, self.draft, self.config)
        if batch.requests:
            self.stats.count_round(done.accept_lens, self.config.num_steps, self.config.num_candidates)
            if observer and recorder:
                observer(recorder.record(batch, candidates, tree, verified, done))
        return going_on

    # endregion one_round

    def _empty_draft_input(self) -> DraftInput:
        """What a rank without requests starts its round from: no rows, of the right widths."""
        model, device = self.draft.model, self.draft.device
        ids = torch.zeros(0, self.config.topk, dtype=torch.int64, device=device)
        hidden = torch.zeros(0, model.config.hidden_size, dtype=model.kv_layout.dtype, device=device)
        probs = torch.zeros(0, self.draft.vocab_size, device=device) if self.config.drafts_are_drawn else None
        return DraftInput(ids.float(), ids, hidden, probs)
