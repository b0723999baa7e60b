"""One speculative round, from the draft's first guess to its next: the readable worker.

`SpecWorker._round` is the whole story, one call for each phase; each phase is a file of `spec/`. Verification and
commit are the same whoever guesses. Who guesses, and how, is a subclass's: EAGLE below, the others in files of their
own. A round of EAGLE costs one target forward and S draft forwards: S - 1 in the loop and one in the extend.

In SGLang the class of this name *is* the draft worker and holds the target; here a worker holds the runners of
both.

Source: SGLang: python/sglang/srt/speculative/eagle_worker.py:EAGLEWorker.forward_batch_speculative_generation
@v0.4.6
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import (
    Candidates,
    CommitOutput,
    DraftInput,
    ForwardMode,
    ForwardOutput,
    VerifyInput,
    VerifyOutput,
)
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner
from refspec.spec.adaptive_steps import AdaptiveSteps
from refspec.spec.chain import ChainBuffers
from refspec.spec.commit import commit
from refspec.spec.draft import DraftLoop, draft, draft_loop
from refspec.spec.extend import extend_after_prefill, extend_after_verify
from refspec.spec.tree import make_tree
from refspec.spec.verify import verify
from refspec.workers.base import Observer, Stats, Worker
from refspec.workers.recorder import RoundRecorder


class SpecWorker(Worker):
    """A worker whose DECODE is a round of speculation. A subclass says what guesses, in four phases."""

    def __init__(self, target: ModelRunner, allocator: SlotAllocator, stats: Stats, config: SpecConfig) -> None:
        super().__init__(target, allocator, stats)
        self.config = config  # of the round that is next, or under way
        self.steps = AdaptiveSteps(config)
        self.chain = ChainBuffers()
        self.observed = False  # does somebody watch the round that is under way?

    def slots_for_round(self, kv_lens: Sequence[int], held_lens: Sequence[int] | None = None) -> int:
        """Those of the trees: all that a round takes, unless drafts need some too."""
        config = self.steps.largest
        return self.allocator.slots_to_extend(kv_lens, [config.tree_end(kv_len) for kv_len in kv_lens])

    # region forward_modes
    def forward(self, batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
        if mode is ForwardMode.EXTEND:
            return self._prefill(batch)
        if mode is ForwardMode.IDLE:
            batch.draft_input = self.empty_draft_input()
        return self._round(batch, observer)

    # endregion forward_modes

    def _prefill(self, batch: RunningBatch) -> RunningBatch:
        """The target reads the prompts; then whoever guesses does, if it reads at all."""
        with self.phase("prefill"):
            out, slots = self.prefill_target(batch)
            return self.read_prompt(batch, out, slots)

    # region one_round
    def _round(self, batch: RunningBatch, observer: Observer | None) -> RunningBatch:
        recorder = RoundRecorder(self.stats, self.config) if observer else None
        self.observed = observer is not None
        with self.phase("draft"):
            candidates = self.draft(batch)
        with self.phase("tree"):
            tree = self.make_tree(batch, candidates)
        with self.phase("verify"):
            verified = verify(batch, tree, self.target, self.allocator, self.config)
        with self.phase("commit"):
            done = commit(batch, verified, self.target, self.allocator, self.config)
        with self.phase("extend"):
            going_on = self.extend(batch, verified, done)
        if batch.requests:
            levels = self.config.num_steps if candidates else 0  # without a pool, make_tree has counted
            self.stats.count_round(done.accept_lens, levels, self.config.num_candidates)
            if observer and recorder:
                recorder.stop()
                observer(recorder.record(batch.requests, candidates, tree, verified, done))
            self.config = self.steps.next_config([done.accept_lens[r] - 1 for r in batch.going_on()])
        return going_on

    # endregion one_round

    @abstractmethod
    def read_prompt(self, batch: RunningBatch, out: ForwardOutput, slots: Tensor) -> RunningBatch:
        """After the target has read extend_lens tokens of each request, at `slots`: get ready to guess what follows.

        Returns the batch of the requests that go on, with their draft_input. Those that only stay to read more of their
        prompt are among them.
        """

    @abstractmethod
    def draft(self, batch: RunningBatch) -> Candidates | None:
        """Guess; the allocator is as it was. None: there is no pool to choose from, make_tree guesses and counts."""

    def make_tree(self, batch: RunningBatch, candidates: Candidates | None) -> VerifyInput:
        """What the target is to check: the best of the candidates."""
        assert candidates is not None
        if not self.chain.fits(batch, self.config):
            return make_tree(batch, candidates, self.config)
        self.stats.chain_rounds += 1 if batch.requests else 0
        return self.chain.make_tree(batch, candidates)

    @abstractmethod
    def extend(self, batch: RunningBatch, verified: VerifyOutput, done: CommitOutput) -> RunningBatch:
        """After a round: get ready to guess what follows. Returns the batch of the requests that go on."""

    def loop_of(self, batch: RunningBatch) -> DraftLoop:
        """The short cut of chains where the round allows it; what it leaves out is made where somebody observes."""
        if self.chain.fits(batch, self.config):
            return partial(self.chain.draft_loop, scored=self.observed)
        return draft_loop

    def empty_draft_input(self) -> DraftInput | None:
        """What a rank without requests starts its round from: no rows, of the right widths."""
        return None


class DraftModelWorker(SpecWorker):
    """A worker whose guesses come from one draft model. Raises ValueError if that has fewer ids than topk asks for."""

    def __init__(
        self, target: ModelRunner, draft: ModelRunner, allocator: SlotAllocator, stats: Stats, config: SpecConfig
    ) -> None:
        super().__init__(target, allocator, stats, config)
        if config.topk > draft.choices:
            raise ValueError(f"topk is {config.topk}, but the draft can propose only {draft.choices} ids")
        self.draft_runner = draft

    @property
    def runners(self) -> list[ModelRunner]:
        return [self.target, self.draft_runner]


class EagleWorkerV1(DraftModelWorker):
    """Target and EAGLE-style draft over one set of slots: EAGLE, EAGLE-3, and MTP with one layer."""

    reads_ahead = 1

    def slots_for_round(self, kv_lens: Sequence[int], held_lens: Sequence[int] | None = None) -> int:
        """The draft's slots are back before the tree's are taken, so it is the larger number of the two."""
        config = self.steps.largest
        drafts = self.allocator.slots_to_extend(kv_lens, [config.draft_end(kv_len) for kv_len in kv_lens])
        return max(drafts, super().slots_for_round(kv_lens))

    # region eagle_phases
    def read_prompt(self, batch: RunningBatch, out: ForwardOutput, slots: Tensor) -> RunningBatch:
        return extend_after_prefill(batch, out.hidden_states, slots, self.draft_runner, self.config)

    def draft(self, batch: RunningBatch) -> Candidates:
        return draft(batch, self.draft_runner, self.allocator, self.config, self.loop_of(batch))

    def extend(self, batch: RunningBatch, verified: VerifyOutput, done: CommitOutput) -> RunningBatch:
        return extend_after_verify(batch, verified, done, self.draft_runner, self.config)

    # endregion eagle_phases

    def empty_draft_input(self) -> DraftInput:
        model, device = self.draft_runner.model, self.draft_runner.device
        ids = torch.zeros(0, self.config.topk, dtype=torch.int64, device=device)
        hidden = torch.zeros(0, model.config.hidden_size, dtype=model.kv_layout.dtype, device=device)
        probs = torch.zeros(0, self.draft_runner.vocab_size, device=device) if self.config.drafts_are_drawn else None
        return DraftInput(ids.float(), ids, hidden, probs)
