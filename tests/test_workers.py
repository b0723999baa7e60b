"""What workers share: the statistics, the counting by phase, the prefill; and plain decoding."""

from __future__ import annotations

import json

import pytest
import torch
from builders import generate_watched, random_logits, scripted_engine, text_logits

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch
from refspec.models.scripted import ScriptedModel
from refspec.runtime.runner import ModelRunner
from refspec.workers.base import Stats

VOCAB = 11


def test_VER_23_accept_length_counts_the_bonus_and_accept_rate_the_levels() -> None:
    """Accepted drafts 3 0 2 1 of three levels each; eight nodes in the tree play no part."""
    stats = Stats()
    for accepted in (3, 0, 2, 1):
        stats.count_round([accepted + 1], num_steps=3, num_candidates=36)
    assert stats.accept_length == 2.5
    assert stats.accept_rate == 0.5
    assert stats.committed_tokens / stats.request_rounds == stats.accept_length
    assert (stats.rounds, stats.candidates) == (4, 144)


def test_VER_23_rounds_of_a_batch_count_for_each_request() -> None:
    stats = Stats()
    stats.count_round([4, 1, 2], num_steps=3, num_candidates=10)
    stats.count_round([3], num_steps=3, num_candidates=10)
    assert (stats.rounds, stats.request_rounds, stats.committed_tokens) == (2, 4, 10)
    assert (stats.accept_length, stats.accept_rate, stats.candidates) == (2.5, 0.5, 40)


def test_VER_23_nothing_counted_yet() -> None:
    assert (Stats().accept_length, Stats().accept_rate) == (0, 0)


@pytest.mark.parametrize("wide", [False, True])
def test_VER_23_of_a_run(wide: bool) -> None:
    """tokens / verify steps = accept length, however many nodes the tree has beside the path."""
    spec = (
        SpecConfig(topk=2, num_steps=3, num_draft_tokens=8)
        if wide
        else SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
    )
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    draft = ScriptedModel(random_logits(VOCAB, salt=5), VOCAB)
    engine = Engine(target, draft, spec)
    (generation,), watcher = generate_watched(engine, [[1, 2]], SamplingParams(max_new_tokens=40))
    assert engine.stats.accept_length == (len(generation.token_ids) - 1) / len(watcher.rounds)
    assert engine.stats.accept_rate == (39 - len(watcher.rounds)) / (3 * len(watcher.rounds))


def test_stats_are_plain_numbers() -> None:
    engine = scripted_engine(random_logits(VOCAB), VOCAB, SpecConfig())
    engine.generate([[1, 2]], SamplingParams(max_new_tokens=9))
    told = json.loads(json.dumps(engine.stats.as_dict()))
    for name in ("target", "draft", "extend", "prefill_target", "prefill_draft"):
        assert told[f"{name}_forwards"] == engine.stats.forwards[name]
    assert told["rounds"] == engine.stats.rounds > 0
    assert told["accept_length"] == engine.stats.accept_length


def test_launches_of_two_engines_are_counted_apart() -> None:
    first, second = (scripted_engine(random_logits(VOCAB), VOCAB, SpecConfig()) for _ in range(2))
    first.generate([[1, 2]], SamplingParams(max_new_tokens=9))
    assert second.stats.launches == {}
    before = first.stats.launches.copy()
    second.generate([[1, 2]], SamplingParams(max_new_tokens=9))
    assert first.stats.launches == before == second.stats.launches


def test_phases_account_for_every_slot() -> None:
    engine = scripted_engine(random_logits(VOCAB), VOCAB, SpecConfig(topk=2, num_steps=2, num_draft_tokens=4))
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=9))
    stats = engine.stats
    assert stats.slots_taken["prefill"] == 3
    assert set(+stats.slots_taken) == {"prefill", "draft", "verify"}
    assert set(+stats.slots_returned) == {"draft", "commit"}
    assert sum(stats.slots_taken.values()) == engine.allocator.taken
    held_at_the_end = 3 + 9 - 1
    assert sum(stats.slots_returned.values()) == engine.allocator.returned - held_at_the_end


# --- prefill ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, SpecConfig()], ids=["plain", "eagle"])
def test_prefill_reads_all_prompts_in_one_forward(spec: SpecConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(random_logits(VOCAB), VOCAB, spec)
    fed: list[ForwardBatch] = []
    original = ModelRunner.forward

    def forward(self, batch, phase, logits_rows=None):  # type: ignore[no-untyped-def]
        if phase == "prefill_target":
            fed.append(batch)
        return original(self, batch, phase, logits_rows)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    engine.generate([[4, 5, 6], [7], [8, 9]], SamplingParams(max_new_tokens=2))
    (batch,) = fed
    assert batch.input_ids.tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.out_slots.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.q_lens == [3, 1, 2]
    assert batch.prefix_lens == [0, 0, 0]
    assert batch.tail_slots.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]


# --- plain decoding -----------------------------------------------------------------------------------------------


def test_VER_02_ties_of_plain_decoding_go_to_the_lowest_id() -> None:
    engine = scripted_engine(lambda context: [1, 3, 3, 2], 4, None)
    (generation,) = engine.generate([[0]], SamplingParams(max_new_tokens=5))
    assert generation.token_ids == [1] * 5


@pytest.mark.parametrize("k", [1, 2, 4])
def test_VER_02_ties_are_broken_alike_in_draft_and_verification(k: int) -> None:
    """Every draft is the target's choice, though two ids are equally likely everywhere."""
    spec = SpecConfig(topk=k, num_steps=1, num_draft_tokens=k + 1)
    engine = scripted_engine(lambda context: [1, 3, 3, 2], 4, spec)
    (generation,) = engine.generate([[0]], SamplingParams(max_new_tokens=7))
    assert generation.token_ids == [1] * 7
    assert generation.accept_lens == [2, 2, 2]


def test_plain_decoding_is_what_the_text_says() -> None:
    text = [0, 0, 5, 6, 7, 8]
    (generation,) = scripted_engine(text_logits(text, VOCAB), VOCAB, None).generate(
        [[0, 0]], SamplingParams(max_new_tokens=4)
    )
    assert generation.token_ids == [5, 6, 7, 8]


def test_plain_requests_leave_and_join_while_others_run() -> None:
    logits = random_logits(VOCAB)
    prompts = [[1], [2, 3], [4], [5, 6]]
    params = [SamplingParams(max_new_tokens=n) for n in (9, 2, 5, 3)]
    together = scripted_engine(logits, VOCAB, None, max_running=2).generate(prompts, params)
    alone = [scripted_engine(logits, VOCAB, None).generate([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


def test_plain_decoding_takes_the_greedy_path_of_the_logits() -> None:
    logits = random_logits(VOCAB)
    (generation,) = scripted_engine(logits, VOCAB, None).generate([[3, 1]], SamplingParams(max_new_tokens=6))
    text = [3, 1]
    for token in generation.token_ids:
        assert token == int(torch.tensor(logits(text)).argmax())
        text.append(token)
