"""The short cut for k = 1 gives what the general path gives, to the last element, or is not taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import pytest
import torch
from builders import agreeing_now_and_then, generate_watched, ragged_prompts, random_logits
from pairwise import pairwise
from torch import Tensor

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import Candidates, DraftInput, ForwardBatch, ForwardOutput, VerifyInput
from refspec.kernels.launches import launches
from refspec.memory.allocator import OutOfSlots, SlotAllocator
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request, RunningBatch
from refspec.spec.chain import ChainBuffers
from refspec.spec.draft import draft, propose
from refspec.spec.tree import make_tree

CPU = torch.device("cpu")
VOCAB, HIDDEN = 29, 5


@dataclass
class NotingRunner:
    """Its answer is a function of all that a row is given; and it keeps what that was."""

    dtype: torch.dtype = torch.float32
    draft_to_target: torch.Tensor | None = None
    vocab_size: int = VOCAB
    calls: list[dict[str, Any]] = field(default_factory=list)

    def forward(self, batch: ForwardBatch, phase: str) -> ForwardOutput:
        assert phase == "draft"
        assert batch.hidden_states is not None
        noted = {name.name: getattr(batch, name.name) for name in fields(batch)}
        self.calls.append({k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in noted.items()})
        rows = torch.stack([batch.input_ids, batch.positions, batch.out_slots], dim=1).double()
        rows = torch.cat([rows, batch.hidden_states.double()], dim=1)
        mixed = rows @ torch.arange(1.0, rows.shape[1] + 1, dtype=torch.float64)
        logits = 5 * torch.sin(mixed[:, None] * torch.arange(1, VOCAB + 1))
        hidden = torch.cos(mixed[:, None] + torch.arange(HIDDEN))
        return ForwardOutput(logits.to(self.dtype), hidden.to(self.dtype))


def chain(steps: int, **settings: Any) -> SpecConfig:
    return SpecConfig(**{"topk": 1, "num_steps": steps, "num_draft_tokens": steps + 1, **settings})


@dataclass
class Start:
    """What a round of b requests begins from; each way of drafting gets a copy of it."""

    config: SpecConfig
    seq_lens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    dtype: torch.dtype = torch.float32
    own_ids: bool = False  # the draft's ids are every other one of the target's

    def __post_init__(self) -> None:
        b, self.runner = len(self.seq_lens), NotingRunner(self.dtype)
        if self.own_ids:
            self.runner.draft_to_target, self.runner.vocab_size = 2 * torch.arange(VOCAB) + 1, 2 * VOCAB
        self.allocator = SlotAllocator(64 * self.config.page_size, CPU, self.config.page_size)
        table = torch.zeros(b + 1, 40, dtype=torch.int64)
        committed = self.allocator.alloc_extend([0] * b, self.seq_lens, torch.zeros(b, dtype=torch.int64))
        for row, slots in enumerate(committed.split(self.seq_lens), start=1):
            table[row, : len(slots)] = slots
        requests = [
            Request(r, [1] * n, self.params, frozenset(), 100, row=r + 1, kv_len=n, seed=r)
            for r, n in enumerate(self.seq_lens)
        ]
        self.batch = RunningBatch.of(requests, table)
        self.batch.bonus_tokens = torch.arange(b) + 3
        generator = torch.Generator().manual_seed(b)
        logits = torch.randn(b, VOCAB, generator=generator)
        hidden = torch.randn(b, HIDDEN, generator=generator).to(self.dtype)
        topk_p, topk_index, law = propose(self.batch, logits, 0, self.config, self.runner)  # type: ignore[arg-type]
        self.batch.draft_input = DraftInput(topk_p, topk_index, hidden, law)

    def by_general_path(self) -> tuple[Candidates, VerifyInput]:
        candidates = draft(self.batch, self.runner, self.allocator, self.config)  # type: ignore[arg-type]
        return candidates, make_tree(self.batch, candidates, self.config)

    def by_chain(self, buffers: ChainBuffers, scored: bool) -> tuple[Candidates, VerifyInput]:
        assert buffers.fits(self.batch, self.config)
        loop = partial(buffers.draft_loop, scored=scored)
        candidates = draft(self.batch, self.runner, self.allocator, self.config, loop)  # type: ignore[arg-type]
        return candidates, buffers.make_tree(self.batch, candidates)


def assert_equal(ours: object, theirs: object, *but: str) -> None:
    """Two dataclasses: every tensor has the same type, shape, layout and entries."""

    def check(mine: Any, other: Any) -> None:
        if isinstance(mine, list):
            assert len(mine) == len(other)
            for pair in zip(mine, other, strict=True):
                check(*pair)
        elif not isinstance(mine, Tensor):
            assert mine == other
        else:
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
            assert torch.equal(mine, other)

    for name in fields(ours):  # type: ignore[arg-type]
        if name.name not in but:
            check(getattr(ours, name.name), getattr(theirs, name.name))


@pytest.mark.parametrize("batch_size", range(5))
@pytest.mark.parametrize("steps", range(1, 9))
def test_TREE_01_the_chain_is_what_the_general_path_makes(steps: int, batch_size: int) -> None:
    """Candidates, tree, every draft forward's rows and slots, and the free slots afterwards."""
    seq_lens, buffers = [7, 1, 12, 4][:batch_size], ChainBuffers(4)
    general, with_scores, without = (Start(chain(steps), seq_lens) for _ in range(3))
    candidates, tree = general.by_general_path()
    scored = with_scores.by_chain(buffers, scored=True)
    assert_equal(scored[0], candidates)
    assert_equal(scored[1], tree)
    unscored = without.by_chain(buffers, scored=False)
    assert unscored[0].score_list == []
    assert_equal(unscored[0], candidates, "score_list")
    assert_equal(unscored[1], tree)
    for chained in (with_scores, without):
        assert chained.runner.calls == general.runner.calls
        assert torch.equal(chained.allocator.free_slots, general.allocator.free_slots)
        assert chained.batch.seq_lens.tolist() == seq_lens
    assert len(general.runner.calls) == steps - 1


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "sampler": ["rejection", "block"],
            "steps": [1, 2, 5],
            "temperature": [0.0, 0.7, 1.5],
            "page_size": [1, 4],
            "dtype": [torch.float64, torch.float32, torch.bfloat16],
            "own_ids": [False, True],
        }
    ),
    ids=str,
)
def test_laws_of_drafts_that_were_drawn_go_along(case: dict[str, Any]) -> None:
    config = chain(case["steps"], sampler=case["sampler"], page_size=case["page_size"])
    settings = SamplingParams(temperature=case["temperature"]), case["dtype"], case["own_ids"]
    start = Start(config, [5, 9, 2], *settings)
    candidates, tree = start.by_general_path()
    ours, our_tree = Start(config, [5, 9, 2], *settings).by_chain(ChainBuffers(), scored=True)
    assert tree.draft_probs is not None
    assert tree.draft_probs.shape == (3, case["steps"], start.runner.vocab_size)
    assert_equal(ours, candidates)
    assert_equal(our_tree, tree)


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_TREE_09_every_dtype_of_logits_and_a_vocabulary_of_the_drafts_own(dtype: torch.dtype, own_ids: bool) -> None:
    """What is fed to the next step, and what stands in the tree, are the target's ids."""
    general, chained = (Start(chain(4), [3, 8], dtype=dtype, own_ids=own_ids) for _ in range(2))
    candidates, tree = general.by_general_path()
    ours, our_tree = chained.by_chain(ChainBuffers(), scored=True)
    assert_equal(ours, candidates)
    assert_equal(our_tree, tree)
    assert chained.runner.calls == general.runner.calls
    assert not own_ids or all(token % 2 for tokens in ours.token_list for (token,) in tokens.tolist())


def test_TREE_01_it_is_taken_only_for_the_whole_chain() -> None:
    """S = 3 with four nodes, not with three; nor for another S than it was made for, more requests, or a tree."""
    buffers, batch = ChainBuffers(2), Start(chain(3), [4, 4]).batch
    assert buffers.fits(batch, chain(3))
    assert not buffers.fits(batch, SpecConfig(topk=1, num_steps=3, num_draft_tokens=3))
    assert not buffers.fits(Start(chain(3), [4, 4, 4]).batch, chain(3))
    assert not buffers.fits(batch, SpecConfig(topk=2, num_steps=3, num_draft_tokens=4))
    assert buffers.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert buffers.top_scores_index.tolist() == [[0, 1, 2]] * 2


def test_made_once_and_again_where_steps_change() -> None:
    buffers = ChainBuffers(3)
    for steps in (2, 7, 1, 5):
        for expected in (1, 0):
            general, chained = (Start(chain(steps), [6, 2]) for _ in range(2))
            _, tree = general.by_general_path()
            launches.clear()
            assert_equal(chained.by_chain(buffers, scored=True)[1], tree)
            assert launches["build_chain_tree"] == expected


def test_launches_that_a_round_saves() -> None:
    """S - 1 draft steps and the tree: S + 1 operations fewer, and no score where nobody looks."""
    for steps in (1, 3, 8):
        general, chained, buffers = Start(chain(steps), [4]), Start(chain(steps), [4]), ChainBuffers()
        launches.clear()
        general.by_general_path()
        before = launches.copy()
        assert buffers.fits(chained.batch, chained.config)
        launches.clear()
        chained.by_chain(buffers, scored=False)
        assert before == Counter(stable_topk=2 * steps - 1, build_tree=1)
        assert +launches == (Counter(draft_topk1=steps - 1) if steps > 1 else Counter())


def test_too_few_slots_are_taken_from_nobody() -> None:
    start = Start(chain(5), [4, 4])
    start.allocator.alloc(start.allocator.available() - 9)
    with pytest.raises(OutOfSlots):
        start.by_chain(ChainBuffers(), scored=False)
    assert start.allocator.available() == 9


# --- in the engine ------------------------------------------------------------------------------------------------


def engine_of(spec: SpecConfig, prealloc: int | None = None, **settings: Any) -> Engine:
    """A draft that is right in three contexts of four. prealloc: for how many requests there are constants."""
    target = ScriptedModel(random_logits(VOCAB), VOCAB)
    other = agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, salt=5))
    engine = Engine(target, ScriptedModel(other, VOCAB), spec, **settings)
    if prealloc is not None:
        engine.scheduler.worker.chain = ChainBuffers(prealloc)  # type: ignore[attr-defined]
    return engine


PROMPTS = ragged_prompts(6, 11, VOCAB)
PLAIN = SamplingParams(max_new_tokens=25)


def solo(spec: SpecConfig | None, params: SamplingParams = PLAIN) -> list[list[int]]:
    alone = Engine(ScriptedModel(random_logits(VOCAB), VOCAB)) if spec is None else engine_of(spec)
    return [alone.generate([prompt], params)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("topk", [1, 2])
def test_SEQ_12_batch_above_the_preallocation(topk: int) -> None:
    """Made for 4, and 6 requests run: rounds of 5 and 6 take the general path, the others the fast one."""
    spec = SpecConfig(topk=topk, num_steps=3, num_draft_tokens=4)
    engine = engine_of(spec, prealloc=4)
    params = [SamplingParams(max_new_tokens=n) for n in (5, 10, 15, 20, 25, 30)]
    generations, watcher = generate_watched(engine, PROMPTS, params)
    assert [g.token_ids for g in generations] == [
        Engine(ScriptedModel(random_logits(VOCAB), VOCAB)).generate([prompt], param)[0].token_ids
        for prompt, param in zip(PROMPTS, params, strict=True)
    ]
    sizes = [len(round_.requests) for round_ in watcher.rounds]
    assert set(sizes) == set(range(1, 7))
    assert engine.stats.chain_rounds == (sum(size <= 4 for size in sizes) if topk == 1 else 0)


@pytest.mark.parametrize("nodes", [3, 4])
def test_TREE_01_fewer_nodes_than_the_chain_has(nodes: int) -> None:
    """S = 3: the fast path with four nodes, the general one with three; the output is the same."""
    engine = engine_of(SpecConfig(topk=1, num_steps=3, num_draft_tokens=nodes))
    generations, watcher = generate_watched(engine, PROMPTS, PLAIN)
    assert [g.token_ids for g in generations] == solo(None)
    assert engine.stats.chain_rounds == (engine.stats.rounds if nodes == 4 else 0)
    for request in watcher.requests:
        assert request.kept == [0, 1, 2][: nodes - 1]
        assert [candidate.parent for candidate in request.candidates] == [-1, 0, 1]


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "algorithm": ["eagle", "eagle-v2", "standalone"],
            "steps": [1, 2, 5, 8],
            "sampler": ["target_only", "rejection", "block"],
            "temperature": [0.0, 1.0],
            "page_size": [1, 4],
            "graphs": [False, True],
            "kv_slots": [128, 512],
        }
    ),
    ids=str,
)
def test_same_rounds_on_both_paths(case: dict[str, Any]) -> None:
    """All that a trace shows, scores too, but for what was launched; and what is not watched comes out the same."""
    steps, params = case["steps"], SamplingParams(max_new_tokens=20, temperature=case["temperature"], seed=3)
    spec = chain(steps, **{name: case[name] for name in ("algorithm", "sampler", "page_size")})
    settings = {"graphs": case["graphs"], "kv_slots": case["kv_slots"], "max_running": 5}
    fast, general = engine_of(spec, **settings), engine_of(spec, prealloc=0, **settings)
    ours, our_rounds = generate_watched(fast, PROMPTS, params)
    theirs, their_rounds = generate_watched(general, PROMPTS, params)
    assert ours == theirs
    nothing_launched: dict[str, Any] = {"launches": {}}
    assert [round_.model_copy(update=nothing_launched) for round_ in our_rounds.rounds] == [
        round_.model_copy(update=nothing_launched) for round_ in their_rounds.rounds
    ]
    launched, in_vain = fast.stats.chain_rounds, fast.stats.chain_rounds - fast.stats.rounds
    assert in_vain == 0 or (in_vain > 0 and case["algorithm"] == "eagle-v2")  # v2 learns too late that all have ended
    assert general.stats.chain_rounds == 0
    assert general.stats.launches.total() - fast.stats.launches.total() == (steps + 1) * launched - 1
    assert fast.stats.launches["build_chain_tree"] == 1  # for all rounds
    assert engine_of(spec, **settings).generate(PROMPTS, params) == ours
