"""An engine under everything that may happen to it; and faults put in on purpose.

`serving_model.py` says what happens, and what is looked at after every step.
"""

from __future__ import annotations

import itertools
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from serving_model import ServingModel, Shape, actions_of, drive

from refspec import SamplingParams
from refspec.contracts import DraftInput
from refspec.engine.scheduler import Scheduler
from refspec.requests.request import Request, RunningBatch
from refspec.requests.sampling import BatchSampling
from refspec.workers.eagle_v2 import EagleWorkerV2

SEED = st.integers(0, 2**32 - 1)
seen = Counter[str]()


class ServingMachine(RuleBasedStateMachine):
    """One rule for every action of the model, more for those without which the others come to nothing."""

    @initialize(seed=SEED)
    def make(self, seed: int) -> None:
        self.model = ServingModel(Shape.drawn(seed, ("eagle", "eagle-v2")[seed % 2]))

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.settle()
            seen.update(self.model.seen)


def rule_of(action: str) -> Callable[..., None]:
    """The rule that does this. Its numbers come out of one draw, since draws are what takes the time here; and of how
    far the engine is, since Hypothesis likes to draw 0.
    """

    def take(self: ServingMachine, seed: int) -> None:
        dice = random.Random(seed + self.model.seen["steps"])
        getattr(self.model, action)(*(dice.getrandbits(16) for _ in range(3)))

    take.__name__ = action
    return rule(seed=SEED)(take)


for name, weight in ServingModel.ACTIONS.items():
    for number in range(-(-weight // 2)):
        setattr(ServingMachine, f"{name}_{number}", rule_of(name))


def test_ten_thousand_engine_steps() -> None:
    """Most of them by Hypothesis, whose choices change with the code; those that are missing then by seeds."""
    seen.clear()
    ServingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=200)
    with torch.inference_mode():  # faster by an eighth
        ServingMachine.TestCase().runTest()
    assert seen["steps"] >= 4_000
    for seed in itertools.count():
        if seen["steps"] >= 10_000:
            break
        shape = Shape.drawn(seed, ("eagle", "eagle-v2")[seed % 2])
        seen.update(drive(shape, actions_of(random.Random(seed)), 500))
    for effect in (
        *("stop", "length", "out_of_slots", "abort", "retracted", "chunked", "failed", "drained", "generate"),
        *("abort of waiting", "abort of chunked", "abort of running"),
        *("retraction of chunked", "retraction of running", "stream to its end"),
        *("tokens found in the cache", "tokens evicted", "leaving"),
    ):
        assert seen[effect], effect


# --- faults put in on purpose -------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def retraction_forgets_the_newest_token(patch: Patch) -> None:
    """It would be chosen again, and of those that sample a second draw bends the law."""
    original = Scheduler.retract

    def retract(self: Scheduler, request: Request) -> None:
        original(self, request)
        del request.output_ids[-1:]

    patch.setattr(Scheduler, "retract", retract)


def who_was_retracted_waits_at_the_end(patch: Patch) -> None:
    original = Scheduler.retract

    def retract(self: Scheduler, request: Request) -> None:
        original(self, request)
        self.waiting.remove(request)
        self.waiting.append(request)

    patch.setattr(Scheduler, "retract", retract)


def who_was_retracted_waits_for_ever(patch: Patch) -> None:
    original = Scheduler._admit
    patch.setattr(
        Scheduler,
        "_admit",
        lambda self, request, *others: 0 if request.retractions else original(self, request, *others),
    )


def chunk_follows_chunk(patch: Patch) -> None:
    patch.setattr(Scheduler, "round_is_due", property(lambda self: False, lambda self, due: None), raising=False)


def chunks_of_any_length(patch: Patch) -> None:
    original = Scheduler._batch_to_extend

    def batch_to_extend(self: Scheduler) -> RunningBatch | None:
        batch = original(self)
        if batch:
            batch.extend_lens = [request.unread_len for request in batch.requests]
        return batch

    patch.setattr(Scheduler, "_batch_to_extend", batch_to_extend)


def the_cache_takes_rows_that_no_draft_wrote(patch: Patch) -> None:
    """Those of the last block of a finished request."""
    original = Scheduler._release

    def release(self: Scheduler, request: Request) -> None:
        if request.finish_reason in ("stop", "length"):
            request.written_len = request.kv_len
        original(self, request)

    patch.setattr(Scheduler, "_release", release)


def what_is_published_is_read_from_freed_copies(patch: Patch) -> None:
    original = Scheduler._publish

    def publish(self: Scheduler, request: Request) -> None:
        row = self.table.req_to_token[request.row].clone()
        original(self, request)
        self.table.req_to_token[request.row] = row

    patch.setattr(Scheduler, "_publish", publish)


def who_has_left_stays_locked(patch: Patch) -> None:
    original = Scheduler._release

    def release(self: Scheduler, request: Request) -> None:
        if self.cache and request.cache_node and request.retractions:
            self.cache.inc_lock_ref(request.cache_node)
        original(self, request)

    patch.setattr(Scheduler, "_release", release)


def guesses_stay_with_their_rows(patch: Patch) -> None:
    """The draft's first guesses are cut to the first so many, when somebody leaves the batch."""
    original = RunningBatch.keep

    def keep(self: RunningBatch, rows: list[int]) -> RunningBatch:
        kept, start = original(self, rows), self.draft_input
        if start and kept is not self:
            n, probs = len(rows), start.draft_probs
            kept.draft_input = DraftInput(
                start.topk_p[:n],
                start.topk_index[:n],
                start.hidden_states[:n],
                None if probs is None else probs[:n],
            )
        return kept

    patch.setattr(RunningBatch, "keep", keep)


def coins_of_the_place_in_the_batch(patch: Patch) -> None:
    original = BatchSampling.of

    def of(params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> BatchSampling:
        return original(params, range(len(seeds)), device)

    patch.setattr(BatchSampling, "of", of)


def rejected_pages_are_freed_whole(patch: Patch) -> None:
    patch.setattr("refspec.spec.commit.align_evict_mask_to_page_size", lambda *arguments: None)


def accepted_rows_are_not_moved(patch: Patch) -> None:
    patch.setattr("refspec.spec.commit.move_kv_cache", lambda *arguments: None)


def branches_begin_with_empty_pages(patch: Patch) -> None:
    """The rows of the last, partly filled page are not copied to them."""
    patch.setattr("refspec.spec.draft.duplicate_prefix_tail", lambda *arguments: None)


def the_failed_keep_their_slots(patch: Patch) -> None:
    original = Scheduler._give_up
    patch.setattr(Scheduler, "_give_up", lambda self, requests: original(self, {*self._holders(), *self.waiting}))


def the_prompt_of_one_that_ends_with_it_is_cached(patch: Patch) -> None:
    """No draft has read it: v2 has read every other newest block."""
    patch.setattr(EagleWorkerV2, "written_len", lambda self, request: request.kv_len)


def one_that_has_ended_leaves_twice(patch: Patch) -> None:
    original = Scheduler._release

    def release(self: Scheduler, request: Request) -> None:
        original(self, request)
        if request in self.leaving and request.finish_reason != "abort":
            self.leaving.append(request)

    patch.setattr(Scheduler, "_release", release)


# Of v2 alone.
FAULTS_OF_V2 = {
    the_prompt_of_one_that_ends_with_it_is_cached: {"_check_pools"},
    one_that_has_ended_leaves_twice: {"check", "_check_that_it_leaves"},
}

# Each with the functions that may complain, the first to notice.
FAULTS = {
    retraction_forgets_the_newest_token: {"_check_request"},
    who_was_retracted_waits_at_the_end: {"check"},
    who_was_retracted_waits_for_ever: {"after_step"},
    chunk_follows_chunk: {"watched"},
    chunks_of_any_length: {"watched"},
    the_cache_takes_rows_that_no_draft_wrote: {"_check_pools"},
    what_is_published_is_read_from_freed_copies: {"_check_shared"},
    who_has_left_stays_locked: {"_check_node"},
    guesses_stay_with_their_rows: {"_check_batch"},
    coins_of_the_place_in_the_batch: {"settle"},
    rejected_pages_are_freed_whole: {"check", "_check_node"},
    accepted_rows_are_not_moved: {"_check_pools"},
    branches_begin_with_empty_pages: {"_check_request", "settle"},
    the_failed_keep_their_slots: {"check", "_fail"},
}


@pytest.mark.parametrize(
    ("fault", "where"), (FAULTS | FAULTS_OF_V2).items(), ids=[fault.__name__ for fault in (*FAULTS, *FAULTS_OF_V2)]
)
def test_a_fault_is_noticed(fault: Callable[[Patch], None], where: set[str], monkeypatch: Patch) -> None:
    """In one of the first shapes, within so many steps of each."""

    def drive_all() -> None:
        for seed in (24, 8, *range(60)):  # two that see what few do, and whatever comes
            algorithm = "eagle-v2" if fault in FAULTS_OF_V2 else "eagle"
            drive(Shape.drawn(seed, algorithm), actions_of(random.Random(seed)), 80)

    fault(monkeypatch)
    with pytest.raises(AssertionError) as noticed:
        drive_all()
    assert traceback.extract_tb(noticed.tb)[-1].name in where
