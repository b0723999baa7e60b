"""One speculative round, from the draft's first guess to its next: the readable worker.

`EagleWorkerV1._round` is the whole story, one call for each phase; each phase is a file of `spec/`. A round costs
one target forward and S draft forwards: S - 1 in the loop and one in the extend.

In SGLang the class of this name *is* the draft worker and holds the target; here a worker holds the runners of
both.

Source: SGLang: python/sglang/srt/speculative/eagle_worker.py:EAGLEWorker.forward_batch_speculative_generation
@v0.4.6
"""

from __future__ import annotations

import torch

from refspec.config import SpecConfig
from refspec.contracts import ForwardMode
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.spec.commit import commit
from refspec.spec.draft import draft
from refspec.spec.extend import extend, extend_after_verify
from refspec.spec.tree import make_tree
from refspec.spec.verify import verify
from refspec.workers.base import Observer, Stats, Worker
from refspec.workers.recorder import RoundRecorder


class EagleWorkerV1(Worker):
    def __init__(
        self, target: ModelRunner, draft: ModelRunner, allocator: SlotAllocator, stats: Stats, config: SpecConfig
    ) -> None:
        super().__init__(target, allocator, stats)
        self.draft, self.config = draft, config

    @property
    def slots_per_round(self) -> int:
        return self.config.slots_per_round

    def forward(self, batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
        if mode is ForwardMode.EXTEND:
            return self._prefill(batch)
        if mode is ForwardMode.IDLE:
            self._prefill(batch)  # sets an empty draft_input for the round
        return self._round(batch, observer)

    def _prefill(self, batch: RunningBatch) -> RunningBatch:
        """The target reads the prompts, then the draft does, on the target's hidden states."""
        with self.phase("prefill"):
            out, slots = self.prefill_target(batch)
            one_ahead = [token for r in batch.requests for token in r.prompt_ids[1:] + r.output_ids[:1]]
            extend(
                batch,
                next_tokens=torch.tensor(one_ahead, dtype=torch.int64, device=slots.device),
                hidden_states=out.hidden_states,
                slots=slots,
                q_lens=[len(r.prompt_ids) for r in batch.requests],
                draft_runner=self.draft,
                config=self.config,
                phase="prefill_draft",
            )
        return batch.keep(batch.going_on())

    def _round(self, batch: RunningBatch, observer: Observer | None) -> RunningBatch:
        recorder = RoundRecorder(self.stats, self.config) if observer else None
        with self.phase("draft"):
            candidates = draft(batch, self.draft, self.allocator, self.config)
        with self.phase("tree"):
            tree = make_tree(batch, candidates, self.config)
        with self.phase("verify"):
            verified = verify(batch, tree, self.target, self.allocator, self.config)
        with self.phase("commit"):
            done = commit(batch, verified, self.allocator)
        with self.phase("extend"):
            going_on = extend_after_verify(batch, verified, done, self.draft, self.config)
        if batch.requests:
            self.stats.count_round(done.accept_lens, self.config.num_steps, self.config.num_candidates)
        if observer and recorder:
            observer(recorder.record(batch, candidates, tree, verified, done))
        return going_on
