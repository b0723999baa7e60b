"""Verification: one forward over all nodes, each node's choice from its own row, ties to the lowest id."""

from __future__ import annotations

import pytest
import torch
from builders import prefix_slots
from reference import tree_of

from refspec import SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch, ForwardOutput, VerifyInput, VerifyOutput
from refspec.memory.allocator import OutOfSlots, SlotAllocator
from refspec.requests.request import Request, RunningBatch
from refspec.spec.verify import verify


class StubTarget:
    """Gives these logits, whatever it is asked."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.calls: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, phase: str) -> ForwardOutput:
        assert phase == "target"
        self.calls.append(batch)
        return ForwardOutput(self.logits, torch.arange(len(self.logits), dtype=torch.float64)[:, None])


def batch_of(seq_lens: list[int]) -> RunningBatch:
    table = torch.arange(100).view(5, 20) + 1000
    requests = [
        Request(r, [1] * n, SamplingParams(), frozenset(), 99, row=r + 1, kv_len=n) for r, n in enumerate(seq_lens)
    ]
    return RunningBatch.of(requests, table)


def verify_input(tokens: list[list[int]], parents: list[int], seq_lens: list[int]) -> VerifyInput:
    """The same tree for every request."""
    n = len(parents)
    trees = [tree_of(parents, seq_len) for seq_len in seq_lens]
    return VerifyInput(
        draft_token=torch.tensor(tokens).flatten(),
        positions=torch.tensor([tree.positions for tree in trees]).flatten(),
        tree_mask=torch.tensor([tree.mask for tree in trees]).flatten(),
        top_scores_index=torch.zeros(len(trees), n - 1, dtype=torch.int64),
        retrieve_index=torch.arange(len(trees) * n).view(-1, n),
        retrieve_next_token=torch.tensor([tree.first_child for tree in trees]),
        retrieve_next_sibling=torch.tensor([tree.next_sibling for tree in trees]),
    )


def run(
    logits: torch.Tensor, tokens: list[list[int]], parents: list[int], slots: int = 30
) -> tuple[VerifyOutput, StubTarget, SlotAllocator]:
    seq_lens = [5, 3][: len(tokens)]
    target, allocator = StubTarget(logits), SlotAllocator(slots, torch.device("cpu"))
    allocator.alloc(4)
    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=len(parents))
    tree = verify_input(tokens, parents, seq_lens)
    verified = verify(batch_of(seq_lens), tree, target, allocator, config)  # type: ignore[arg-type]
    return verified, target, allocator


def peaks(ids: list[int], vocab_size: int = 20) -> torch.Tensor:
    """Row r has its peak at ids[r]."""
    logits = torch.zeros(len(ids), vocab_size)
    logits[torch.arange(len(ids)), torch.tensor(ids)] = 5.0
    return logits


def test_VER_24_each_node_is_judged_by_its_own_row() -> None:
    """A tree of four for two requests; row r of request b has its peak at 10·b + r."""
    choices = [10 * b + r for b in range(2) for r in range(4)]
    verified, _, _ = run(peaks(choices), [[9, 9, 9, 9], [9, 9, 9, 9]], [-1, 0, 0, 1])
    assert verified.target_predict.view(2, 4).tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_VER_24_and_each_request_by_its_own_rows() -> None:
    """The first takes the right branch, the second the left one."""
    tokens = [[7, 1, 2, 3, 4], [7, 1, 2, 3, 4]]
    parents = [-1, 0, 0, 1, 2]  # 3 under 1, 4 under 2
    verified, _, _ = run(peaks([2, 0, 4, 0, 8, 1, 3, 0, 9, 0]), tokens, parents)
    assert verified.accept_index.tolist() == [[0, 2, 4, -1], [5, 6, 8, -1]]
    assert verified.accept_token_num.tolist() == [2, 2]
    assert verified.predict.view(2, 5).tolist() == [[2, 0, 4, 0, 8], [1, 3, 0, 9, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_VER_02_ties_of_the_target_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    verified, _, _ = run(torch.tensor([[1, 3, 3, 2]] * 2, dtype=dtype), [[0, 1]], [-1, 0])
    assert verified.target_predict.tolist() == [1, 1]
    assert verified.accept_token_num.tolist() == [1]


def test_the_forward_covers_every_node_of_every_request() -> None:
    tokens, parents = [[7, 1, 2, 3], [8, 4, 5, 6]], [-1, 0, 0, 1]
    verified, target, allocator = run(peaks([0] * 8), tokens, parents)
    (batch,) = target.calls
    assert batch.input_ids.tolist() == [7, 1, 2, 3, 8, 4, 5, 6]
    assert batch.positions.tolist() == [5, 6, 6, 7, 3, 4, 4, 5]
    assert batch.q_lens == [4, 4]
    assert batch.prefix_lens == [5, 3]
    assert prefix_slots(batch) == [list(range(1020, 1025)), list(range(1040, 1043))]
    assert batch.out_slots.tolist() == list(range(5, 13)) == verified.out_slots.tolist()
    assert batch.tail_slots.tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert batch.tail_mask is not None
    assert batch.tail_mask.tolist() == [tree_of(parents, 0).mask] * 2
    assert batch.hidden_states is None
    assert verified.hidden_states.flatten().tolist() == list(range(8))
    assert (allocator.taken, allocator.returned) == (4 + 8, 0)


def test_too_few_slots_for_the_tree_take_none() -> None:
    with pytest.raises(OutOfSlots, match="8 KV slots are needed, 6 of 10 are free"):
        run(peaks([0] * 8), [[7, 1, 2, 3], [8, 4, 5, 6]], [-1, 0, 0, 1], slots=10)
