"""What was accepted becomes output and cache; everything else goes back to the pool."""

from __future__ import annotations

import pytest
import torch

from refspec import SamplingParams, SpecConfig
from refspec.contracts import CommitOutput, VerifyOutput
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import Request, RunningBatch
from refspec.spec.commit import commit

STOP = 99


class Scene:
    """Requests of these lengths, each with a tree of n nodes and an accepted path.

    The token after column c of request r, where it is on the path, is 10·(r + 1) + c.
    """

    def __init__(self, seq_lens: list[int], paths: list[list[int]], n: int = 5, budget: int = 100) -> None:
        self.n, self.allocator = n, SlotAllocator(100, torch.device("cpu"))
        self.table = torch.zeros(len(seq_lens) + 1, 60, dtype=torch.int64)
        self.requests = []
        for r, length in enumerate(seq_lens):
            request = Request(r, [1] * length, SamplingParams(max_new_tokens=budget), frozenset({STOP}), 60, [5])
            request.row, request.kv_len = r + 1, length
            self.table[r + 1, :length] = self.allocator.alloc(length)
            self.requests.append(request)
        self.before = self.table.clone()
        self.batch = RunningBatch.of(self.requests, self.table)
        self.out_slots = self.allocator.alloc(n * len(seq_lens))
        steps = n - 1
        self.paths = paths
        predict = torch.zeros(n * len(seq_lens), dtype=torch.int32)
        for r, path in enumerate(paths):
            for column in path:
                predict[r * n + column] = 10 * (r + 1) + column
        self.verified = VerifyOutput(
            out_slots=self.out_slots,
            hidden_states=torch.zeros(len(predict), 1),
            target_predict=predict.long(),
            predict=predict,
            accept_index=torch.tensor(
                [[r * n + c for c in path] + [-1] * (steps + 1 - len(path)) for r, path in enumerate(paths)],
                dtype=torch.int32,
            ).view(-1, steps + 1),
            accept_token_num=torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32),
            logits=torch.zeros(len(predict), 1),
            finite=torch.tensor(True),
        )

    def commit(self) -> CommitOutput:
        return commit(self.batch, self.verified, None, self.allocator, SpecConfig())  # type: ignore[arg-type]

    def slots_of(self, r: int, columns: list[int]) -> list[int]:
        return [int(self.out_slots[r * self.n + c]) for c in columns]

    def assert_holds(self, kept: list[list[int]]) -> None:
        """Of the tree's slots just those of these columns are taken, entered behind the old ones in this order."""
        owners = []
        for r, (request, columns) in enumerate(zip(self.requests, kept, strict=True)):
            old, row = self.batch_lens[r], self.table[r + 1]
            assert row[:old].tolist() == self.before[r + 1, :old].tolist()
            assert row[old : old + len(columns)].tolist() == self.slots_of(r, columns)
            assert row[old + len(columns) :].tolist() == self.before[r + 1, old + len(columns) :].tolist()
            assert request.kv_len == old + len(columns)
            owners.append((f"request {r}", row[: request.kv_len]))
        self.allocator.check(owners)
        assert self.batch.seq_lens.tolist() == [request.kv_len for request in self.requests]

    @property
    def batch_lens(self) -> list[int]:
        return [len(request.prompt_ids) for request in self.requests]


def test_SEQ_03_lengths_advance_each_by_its_own() -> None:
    """Lengths 10 and 7, accepted drafts 3 and 0: next lengths 14 and 8, where the next roots will sit."""
    scene = Scene([10, 7], [[0, 1, 2, 3], [0]])
    done = scene.commit()
    assert scene.batch.seq_lens.tolist() == [14, 8]
    assert done.accept_lens == [4, 1]
    assert done.kept_rows == [[0, 1, 2, 3], [5]]
    assert [request.output_ids for request in scene.requests] == [[5, 10, 11, 12, 13], [5, 20]]
    assert [request.accept_lens for request in scene.requests] == [[4], [1]]
    scene.assert_holds([[0, 1, 2, 3], [0]])


@pytest.mark.parametrize(
    "paths",
    [[[0], [0]], [[0, 2], [0, 1, 4]], [[0, 4], [0]], [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], [[0, 3], [0, 2, 4]]],
    ids=str,
)
def test_only_the_accepted_path_is_held(paths: list[list[int]]) -> None:
    scene = Scene([3, 6], paths)
    free = scene.allocator.available()
    done = scene.commit()
    scene.assert_holds(paths)
    rejected = [scene.slots_of(r, [c for c in range(5) if c not in path]) for r, path in enumerate(paths)]
    assert done.freed_slots.tolist() == [slot for slots in rejected for slot in slots]
    assert scene.allocator.available() == free + len(done.freed_slots)


@pytest.mark.parametrize("stop_at", range(4))
def test_FIN_10_a_stop_cuts_output_cache_and_counts_alike(stop_at: int) -> None:
    """The path is 0 1 3 4; the token after one of its nodes is a stop. The neighbour is not concerned."""
    path = [0, 1, 3, 4]
    scene = Scene([3, 6], [path, [0, 2]])
    scene.verified.predict[path[stop_at]] = STOP
    done = scene.commit()
    assert done.accept_lens == [stop_at + 1, 2]
    assert scene.requests[0].output_ids == [5, *[10 + c for c in path[:stop_at]], STOP]
    assert scene.requests[0].accept_lens == [stop_at + 1]
    assert scene.requests[0].finish_reason == "stop"
    assert scene.requests[1].finish_reason is None
    scene.assert_holds([path[: stop_at + 1], [0, 2]])


@pytest.mark.parametrize("budget", range(2, 7))
def test_FIN_09_a_budget_cuts_output_cache_and_counts_alike(budget: int) -> None:
    scene = Scene([3], [[0, 1, 2, 3]], budget=budget)  # one token of the output is there already
    done = scene.commit()
    kept = min(budget - 1, 4)
    assert done.accept_lens == [kept]
    assert len(scene.requests[0].output_ids) == 1 + kept
    scene.assert_holds([[0, 1, 2, 3][:kept]])


def test_no_requests() -> None:
    done = Scene([], []).commit()
    assert (done.accept_lens, done.kept_rows, done.freed_slots.shape) == ([], [], (0,))
