"""Would the tests see a fault in spec v2's own lines? Each fault here is put in on purpose, and must show: in the
output, in the number of accepted drafts, or in what check() says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from serving_faults import PAIRS, TREE, accept_lens_alone, complaints_about, what_shows
from torch import Tensor

import refspec.spec.commit as commit
import refspec.spec.extend as extend
import refspec.workers.eagle_v2 as eagle_v2
from refspec import SpecConfig
from refspec.contracts import VerifyOutput
from refspec.engine.scheduler import Scheduler
from refspec.requests.request import RunningBatch
from refspec.workers.base import RoundInFlight

Patch = pytest.MonkeyPatch
V2 = replace(TREE, algorithm="eagle-v2")


def change_extend(patch: Patch, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
    """Tamper with its positions, its tokens, its last rows."""
    original = extend.padded_extend_inputs
    patch.setattr(extend, "padded_extend_inputs", lambda *arguments: change(*original(*arguments)))


def extend_positions_one_ahead(patch: Patch) -> None:
    change_extend(patch, lambda positions, tokens, last: (positions + 1, tokens, last))


def the_next_round_starts_from_the_row_before_the_bonus(patch: Patch) -> None:
    change_extend(patch, lambda positions, tokens, last: (positions, tokens, (last - 1).clamp(min=0)))


def the_next_round_starts_from_the_last_row_of_all(patch: Patch) -> None:
    n = TREE.num_draft_tokens
    change_extend(patch, lambda positions, tokens, last: (positions, tokens, last // n * n + n - 1))


def hidden_states_stay_where_they_were(patch: Patch) -> None:
    original = eagle_v2.bring_paths_to_front

    def compact(verified: VerifyOutput, *others: Any) -> None:
        hidden = verified.hidden_states
        original(verified, *others)
        verified.hidden_states = hidden

    patch.setattr(eagle_v2, "bring_paths_to_front", compact)


def predict_stays_where_it_was(patch: Patch) -> None:
    original = eagle_v2.bring_paths_to_front

    def compact(verified: VerifyOutput, *others: Any) -> None:
        predict = verified.predict
        original(verified, *others)
        verified.predict = predict

    patch.setattr(eagle_v2, "bring_paths_to_front", compact)


def keys_and_values_stay_where_they_were(patch: Patch) -> None:
    patch.setattr(commit, "move_kv_cache", lambda *arguments: None)


def room_for_the_tree_alone_is_reserved(patch: Patch) -> None:
    patch.setattr(SpecConfig, "round_end", SpecConfig.tree_end)


def rounds_in_flight_are_forgotten(patch: Patch) -> None:
    """Room is counted by what the host knows."""
    patch.setattr(RunningBatch, "prefix_lens", property(lambda self: [request.kv_len for request in self.requests]))


def the_bound_is_taken_for_the_length(patch: Patch) -> None:
    patch.setattr(RunningBatch, "lens", None)


def branches_begin_with_empty_pages(patch: Patch) -> None:
    patch.setattr("refspec.spec.draft.duplicate_prefix_tail", lambda *arguments: None)


def who_has_ended_stays_in_the_batch(patch: Patch) -> None:
    original = Scheduler._look_at

    def look_at(self: Scheduler, in_flight: RoundInFlight) -> None:
        running = self.running
        original(self, in_flight)
        self.running = running

    patch.setattr(Scheduler, "_look_at", look_at)


FAULTS = [
    extend_positions_one_ahead,
    the_next_round_starts_from_the_row_before_the_bonus,
    the_next_round_starts_from_the_last_row_of_all,
    hidden_states_stay_where_they_were,
    predict_stays_where_it_was,
    keys_and_values_stay_where_they_were,
    room_for_the_tree_alone_is_reserved,
    rounds_in_flight_are_forgotten,
    the_bound_is_taken_for_the_length,
    branches_begin_with_empty_pages,
    who_has_ended_stays_in_the_batch,
]


def test_nothing_shows_without_a_fault() -> None:
    assert what_shows(V2) == set()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    for name in PAIRS:
        accept_lens_alone(name)  # before the fault
    fault(monkeypatch)
    assert any(complaints_about(name, V2) - {"nothing happened"} for name in PAIRS)
