"""The draft loop against a beam that is sorted by hand: candidates, rows, slots and masks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from builders import candidates_of, prefix_slots
from hypothesis import given
from hypothesis import strategies as st
from reference import Node, grow

from refspec import SamplingParams, SpecConfig
from refspec.contracts import DraftInput, ForwardBatch, ForwardOutput
from refspec.memory.allocator import OutOfSlots, SlotAllocator
from refspec.requests.request import Request, RunningBatch
from refspec.spec.draft import best_tokens, draft, select_top_k_tokens

CPU = torch.device("cpu")
SMALLEST = 2.0**-149

Children = list[tuple[float, int]]  # of one node: (probability, token)


def random_children(rng: random.Random, topk: int, kind: str) -> Children:
    draw = {
        "any": lambda: float(torch.tensor(rng.random(), dtype=torch.float32)),
        "ties": lambda: rng.choice([0.0, 0.25, 0.5, 1.0]),
        "tiny": lambda: rng.choice([0.0, SMALLEST, 2.0**-80]),
    }[kind]
    return sorted(((draw(), rng.randrange(100)) for _ in range(topk)), key=lambda child: -child[0])


def tensors_of(children: list[Children]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids, a row for each node."""
    return (
        torch.tensor([[p for p, _ in node] for node in children], dtype=torch.float32),
        torch.tensor([[token for _, token in node] for node in children]),
    )


@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    topk=st.integers(1, 5),
    steps=st.integers(1, 5),
    kind=st.sampled_from(["any", "ties", "tiny"]),
)
def test_levels_as_by_a_beam_sorted_by_hand(seed: int, batch: int, topk: int, steps: int, kind: str) -> None:
    rng = random.Random(seed)
    given_children = [
        [[random_children(rng, topk, kind) for _ in range(topk if level else 1)] for level in range(steps)]
        for _ in range(batch)
    ]
    grown = [grow(children, topk) for children in given_children]

    # The hidden state of a row tells whose it is: (request, pool index), -1 for the root.
    hidden = torch.tensor([[r, -1] for r in range(batch)])
    scores = torch.zeros(0)
    pool_sizes = [candidates_of(topk, level) for level in range(steps + 1)]
    for level in range(steps):
        topk_p, topk_index = tensors_of([node for children in given_children for node in children[level]])
        input_ids, parents_hidden, scores, (level_scores, level_tokens, entries) = select_top_k_tokens(
            level, topk_p, topk_index, hidden, scores, topk
        )
        for r, (pool, beams) in enumerate(grown):
            new = pool[pool_sizes[level] : pool_sizes[level + 1]]
            assert level_scores[r].flatten().tolist() == [node.score for node in new]
            assert level_tokens[r].tolist() == [node.token for node in new]
            assert entries[r].tolist() == ([-1] if level == 0 else []) + beams[level]
            assert scores[r].tolist() == [pool[i].score for i in beams[level]]
            rows = slice(r * topk, (r + 1) * topk)
            assert input_ids[rows].tolist() == [pool[i].token for i in beams[level]]
            assert parents_hidden[rows].tolist() == [[r, pool[i].parent] for i in beams[level]]
        hidden = torch.tensor([[r, i] for r, (_, beams) in enumerate(grown) for i in beams[level]])
    assert level_scores.shape == ((batch, 1, topk) if steps == 1 else (batch, topk, topk))
    assert (scores.dtype, input_ids.dtype, entries.dtype) == (torch.float32, torch.int64, torch.int64)


def test_TREE_05_second_level() -> None:
    """A .6 and B .4 under the root; under A: C .9, D .1; under B: E .8, F .2."""
    a, b, c, d, e, f = 11, 12, 13, 14, 15, 16
    first = select_top_k_tokens(0, *tensors_of([[(0.6, a), (0.4, b)]]), torch.tensor([[0.0]]), torch.zeros(0), 2)
    ids, _, scores, level = first
    assert ids.tolist() == [a, b]
    assert level[2].tolist() == [[-1, 0, 1]]
    second = select_top_k_tokens(
        1, *tensors_of([[(0.9, c), (0.1, d)], [(0.8, e), (0.2, f)]]), torch.tensor([[1.0], [2.0]]), scores, 2
    )
    ids, hidden, scores, level = second
    assert ids.tolist() == [c, e]
    assert hidden.tolist() == [[1.0], [2.0]]
    torch.testing.assert_close(scores, torch.tensor([[0.54, 0.32]]))
    torch.testing.assert_close(level[0], torch.tensor([[[0.54, 0.06], [0.32, 0.08]]]))
    assert level[1].tolist() == [[c, d, e, f]]
    assert level[2].tolist() == [[2, 4]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_VER_02_ties_of_the_draft_go_to_the_lower_id(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1, 3, 3, 2]], dtype=dtype)
    for k, ids in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3])):
        probabilities, indices = best_tokens(logits, k)
        assert indices.tolist() == [ids]
        assert probabilities.dtype == torch.float32


def test_probabilities_are_a_softmax_in_float32() -> None:
    probabilities, _ = best_tokens(torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float16), 3)
    torch.testing.assert_close(probabilities, torch.tensor([[2.0, 1.0, 0.0]]).softmax(-1))


# --- the loop -----------------------------------------------------------------------------------------------------


@dataclass
class StubRunner:
    """Answers each row with the children that were laid down for it, and notes what it was given."""

    levels: list[list[Children]]  # [step][row of the whole batch]
    vocab_size: int = 100
    fail_at: int = -1
    draft_to_target: None = None
    calls: list[ForwardBatch] = field(default_factory=list)

    def forward(self, batch: ForwardBatch, phase: str) -> ForwardOutput:
        assert phase == "draft"
        if len(self.calls) == self.fail_at:
            raise RuntimeError("on purpose")
        children = self.levels[len(self.calls)]
        self.calls.append(batch)
        logits = torch.full((len(children), self.vocab_size), -1e4)
        for row, below in enumerate(children):
            for p, token in below:
                logits[row, token] = torch.tensor(p).log()
        step = len(self.calls)
        return ForwardOutput(logits, torch.tensor([[float(step), row] for row in range(len(children))]))


def distinct_children(rng: random.Random, topk: int) -> Children:
    """As a real softmax gives them: distinct ids, probabilities that sum to 1."""
    weights = sorted((rng.random() for _ in range(topk)), reverse=True)
    return [(w / sum(weights), token) for w, token in zip(weights, rng.sample(range(100), topk), strict=True)]


@dataclass
class Loop:
    """One call of `draft`, and what it should have done."""

    config: SpecConfig
    seq_lens: list[int]
    seed: int = 0

    def __post_init__(self) -> None:
        rng, k, b = random.Random(self.seed), self.config.topk, len(self.seq_lens)
        self.first = [distinct_children(rng, k) for _ in range(b)]
        later = [[distinct_children(rng, k) for _ in range(b * k)] for _ in range(self.config.num_steps - 1)]
        self.runner = StubRunner(later)
        table = torch.arange(10 * (b + 1)).view(b + 1, 10) + 1000
        requests = [
            Request(r, [1] * n, SamplingParams(), frozenset(), 100, row=r + 1, kv_len=n)
            for r, n in enumerate(self.seq_lens)
        ]
        self.batch = RunningBatch.of(requests, table)
        self.batch.draft_input = DraftInput(*tensors_of(self.first), torch.tensor([[0.0, r] for r in range(b)]))
        self.allocator = SlotAllocator(200, CPU)
        self.allocator.alloc(3)
        self.free_before = self.allocator.free_slots.tolist()

    def run(self) -> None:
        self.candidates = draft(self.batch, self.runner, self.allocator, self.config)  # type: ignore[arg-type]
        k = self.config.topk
        self.grown: list[tuple[list[Node], list[list[int]]]] = []
        for r in range(len(self.seq_lens)):
            # What the model says goes through a softmax, so the reference is given the probabilities that came out.
            levels = [
                [
                    list(zip(*(t.tolist() for t in pair), strict=True))
                    for pair in zip(*best_tokens_of(step, r, k), strict=True)
                ]
                for step in self.runner.levels
            ]
            self.grown.append(grow([[self.first[r]], *levels], k))


def best_tokens_of(step: list[Children], r: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    stub = StubRunner([step])
    none = torch.zeros(0, dtype=torch.int64)
    logits = stub.forward(ForwardBatch(none, none, none, [], none, none, [], none, None), "draft").logits
    return best_tokens(logits[r * k : (r + 1) * k], k)


SHAPES = [(1, 1), (1, 4), (2, 3), (3, 4), (4, 2)]


@pytest.mark.parametrize(("topk", "steps"), SHAPES)
@pytest.mark.parametrize("exact", [False, True])
def test_rows_of_every_step(topk: int, steps: int, exact: bool) -> None:
    """Ids, positions, slots, prefix, hidden states; and whom each row sees of the steps before."""
    config = SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=2, exact_branch_kv=exact)
    loop = Loop(config, seq_lens=[5, 2])
    loop.run()
    assert len(loop.runner.calls) == steps - 1
    slots = loop.candidates.slots
    assert slots.tolist() == [
        [[loop.free_before[(r * topk + j) * steps + i] for i in range(steps)] for j in range(topk)] for r in range(2)
    ]
    for i, call in enumerate(loop.runner.calls):
        beams = [grown[1][i] for grown in loop.grown]
        assert call.input_ids.tolist() == [
            grown[0][node].token for grown, beam in zip(loop.grown, beams, strict=True) for node in beam
        ]
        assert call.positions.tolist() == [5 + i] * topk + [2 + i] * topk
        assert call.q_lens == [topk, topk]
        assert call.prefix_lens == [5, 2]
        assert prefix_slots(call) == [list(range(1010, 1015)), list(range(1020, 1022))]
        assert call.out_slots.tolist() == slots[:, :, i].flatten().tolist()
        assert call.hidden_states is not None
        assert call.hidden_states.tolist() == [
            [float(i), float(r * topk + parent_branch(loop.grown[r], i, j) if i else r)]
            for r in range(2)
            for j in range(topk)
        ]
        for r in range(2):
            for j in range(topk):
                seen = [
                    slot
                    for column, slot in enumerate(call.tail_slots[r].tolist())
                    if call.tail_mask is None or call.tail_mask[r, j, column]
                ]
                line = branches(loop.grown[r], i, j) if exact else [j] * (i + 1)
                assert seen == [slots[r, branch, step].item() for step, branch in enumerate(line)]


def parent_branch(grown: tuple[list[Node], list[list[int]]], step: int, branch: int) -> int:
    pool, beams = grown
    return beams[step - 1].index(pool[beams[step][branch]].parent)


def branches(grown: tuple[list[Node], list[list[int]]], step: int, branch: int) -> list[int]:
    """In which branch of each step the ancestors of a row stand, itself last."""
    if step == 0:
        return [branch]
    return [*branches(grown, step - 1, parent_branch(grown, step, branch)), branch]


@pytest.mark.parametrize(("topk", "steps"), SHAPES)
def test_candidates_are_the_whole_pool(topk: int, steps: int) -> None:
    loop = Loop(
        SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=2, exact_branch_kv=True), seq_lens=[5, 2], seed=3
    )
    loop.run()
    tokens = torch.cat(loop.candidates.token_list, dim=1)
    scores = torch.cat([level.flatten(1) for level in loop.candidates.score_list], dim=1)
    assert tokens.tolist() == [[node.token for node in pool] for pool, _ in loop.grown]
    assert scores.tolist() == [[node.score for node in pool] for pool, _ in loop.grown]


@pytest.mark.parametrize(("topk", "steps"), SHAPES)
def test_slots_are_back_when_the_loop_ends(topk: int, steps: int) -> None:
    """All of them, in their old order: verify will be given the same ones."""
    loop = Loop(SpecConfig(topk=topk, num_steps=steps, num_draft_tokens=2), seq_lens=[5, 2, 4])
    loop.run()
    assert loop.allocator.free_slots.tolist() == loop.free_before
    assert (loop.allocator.taken, loop.allocator.returned) == (3 + 3 * topk * steps, 3 * topk * steps)


def test_too_few_slots_for_the_loop_take_none() -> None:
    loop = Loop(SpecConfig(topk=4, num_steps=3, num_draft_tokens=2), seq_lens=[5, 2])
    loop.allocator.alloc(180)
    with pytest.raises(OutOfSlots, match="24 KV slots are needed, 17 of 200 are free"):
        loop.run()
    assert loop.allocator.available() == 17
