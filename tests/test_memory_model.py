"""Allocator and prefix cache under a scheduler, step by step beside an oracle; and faults put in on purpose.

`memory_model.py` says what the steps are, what the oracle knows and what is checked after each.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory_model import SHAPES, MemoryModel, ModelRequest, Shape, drive

import refspec.memory.prefix_cache as prefix_cache
from refspec.memory.allocator import AllocatorState, SlotAllocator
from refspec.memory.prefix_cache import PrefixCache, TreeNode

SEED = st.integers(0, 2**32 - 1)
steps_taken = Counter[str]()


def numbers(seed: int) -> list[int]:
    """What a step is given. Of one draw, since those are what takes the time here."""
    dice = random.Random(seed)
    return [dice.getrandbits(16) for _ in range(3)]


class MemoryMachine(RuleBasedStateMachine):
    """One rule for every step of the model."""

    @initialize(shape=st.sampled_from(SHAPES))
    def make(self, shape: Shape) -> None:
        self.model = MemoryModel(shape)

    @rule(seed=SEED)
    def two_of_a_kind(self, seed: int) -> None:
        """Two requests with one prompt, side by side: both compute what one of them will insert first."""
        for step in (self.model.arrive, self.model.arrive, self.model.admit, self.model.admit):
            step(*numbers(seed))
            self.model.check()
            self.model.seen["steps"] += 1

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            steps_taken.update(self.model.seen)


def rule_of(step: str) -> Callable[..., None]:
    """The rule that takes this step."""

    def take(self: MemoryMachine, seed: int) -> None:
        getattr(self.model, step)(*numbers(seed))
        self.model.seen["steps"] += 1

    take.__name__ = step
    return rule(seed=SEED)(take)


# A step that needs what only others bring comes to nothing where it is not there, so those are on offer more often.
for step, times in [("arrive", 2), ("admit", 2), ("decode", 4), *((step, 1) for step in MemoryModel.STEPS)]:
    for time in range(times):
        setattr(MemoryMachine, f"{step}_{time}", rule_of(step))


def test_ten_thousand_steps_of_hypothesis() -> None:
    steps_taken.clear()
    MemoryMachine.TestCase.settings = settings(max_examples=230, stateful_step_count=50)
    MemoryMachine.TestCase().runTest()
    assert steps_taken["steps"] >= 10_000
    for effect in ("prefix hit", "duplicates", "pressure", "retracted", "evicted", "stop in a round"):
        assert steps_taken[effect] >= 5, effect


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_thousand_steps_of_a_seeded_driver(shape: Shape) -> None:
    model = MemoryModel(shape)
    drive(model, 1000, seed=5)
    assert model.seen["pressure"] > 5
    assert model.seen["prefix hit"] > 0
    for request in list(model.running):
        model._end(request, insert=True)
    model.cache.evict(model.cache.evictable_size)
    assert model.allocator.available() == model.allocator.size


# --- faults put in on purpose -------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def split_loses_slots(patch: Patch) -> None:
    original = PrefixCache._split

    def split(self: PrefixCache, node: TreeNode, length: int) -> TreeNode:
        slots = node.slots
        upper = original(self, node, length)
        node.slots = slots[: len(node.key)]
        return upper

    patch.setattr(PrefixCache, "_split", split)


def split_forgets_the_lock(patch: Patch) -> None:
    original = PrefixCache._split

    def split(self: PrefixCache, node: TreeNode, length: int) -> TreeNode:
        upper = original(self, node, length)
        upper.lock_ref = 0
        return upper

    patch.setattr(PrefixCache, "_split", split)


def split_within_a_page(patch: Patch) -> None:
    def common_len(self: PrefixCache, key: list, other: list) -> int:  # type: ignore[type-arg]
        return next((i for i, (x, y) in enumerate(zip(key, other, strict=False)) if x != y), len(other))

    patch.setattr(PrefixCache, "_common_len", common_len)


def eviction_ignores_locks(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_is_evictable", lambda self, node: not node.children and node is not self.root)


def eviction_stops_at_the_first_leaves(patch: Patch) -> None:
    no_push = SimpleNamespace(heapify=heapq.heapify, heappop=heapq.heappop, heappush=lambda heap, entry: None)
    patch.setattr(prefix_cache, "heapq", no_push)


def eviction_takes_the_newest(patch: Patch) -> None:
    newest = SimpleNamespace(heapify=lambda heap: heap.sort(), heappop=lambda heap: heap.pop(), heappush=list.append)
    patch.setattr(prefix_cache, "heapq", newest)


def eviction_frees_nothing(patch: Patch) -> None:
    original = PrefixCache.evict

    def evict(self: PrefixCache, num_slots: int) -> int:
        allocator, self.allocator = self.allocator, SimpleNamespace(free=lambda slots: None)  # type: ignore[assignment]
        try:
            return original(self, num_slots)
        finally:
            self.allocator = allocator

    patch.setattr(PrefixCache, "evict", evict)


def a_match_is_no_use(patch: Patch) -> None:
    """last_used stays what it was at the insert."""
    original = PrefixCache.match_prefix

    def match_prefix(self: PrefixCache, token_ids: list[int]) -> prefix_cache.PrefixMatch:
        before = {node: node.last_used for node in self._nodes()}
        match = original(self, token_ids)
        for node, used in before.items():
            node.last_used = used
        return match

    patch.setattr(PrefixCache, "match_prefix", match_prefix)


def insert_takes_duplicates(patch: Patch) -> None:
    """The newcomer's slots replace those that requests are reading."""
    original = PrefixCache.insert

    def insert(self: PrefixCache, token_ids: list[int], slots: torch.Tensor) -> int:
        had = original(self, token_ids, slots)
        node, _ = self._walk(self._units(token_ids))
        end = self.cacheable_len(len(token_ids))
        while node.parent is not None:
            node.slots = slots[end - len(node.key) : end].clone()
            end -= len(node.key)
            node = node.parent
        return had

    patch.setattr(PrefixCache, "insert", insert)


def insert_says_that_it_had_nothing(patch: Patch) -> None:
    original = PrefixCache.insert

    def insert(self: PrefixCache, token_ids: list[int], slots: torch.Tensor) -> int:
        original(self, token_ids, slots)
        return 0

    patch.setattr(PrefixCache, "insert", insert)


def unlock_stops_at_the_node(patch: Patch) -> None:
    original = PrefixCache.dec_lock_ref

    def dec_lock_ref(self: PrefixCache, node: TreeNode) -> None:
        original(self, node)
        if node.parent is not None and node.parent.parent is not None:
            self.inc_lock_ref(node.parent)

    patch.setattr(PrefixCache, "dec_lock_ref", dec_lock_ref)


def locks_do_not_count_as_protected(patch: Patch) -> None:
    def inc_lock_ref(self: PrefixCache, node: TreeNode) -> None:
        for above in self._path(node):
            above.lock_ref += 1

    patch.setattr(PrefixCache, "inc_lock_ref", inc_lock_ref)


def plain_keys_for_a_draft(patch: Patch) -> None:
    """What SGLang did before it had bigrams. The oracle is told of plain keys, too: only the draft's rows can tell."""
    patch.setattr(PrefixCache, "_units", lambda self, ids: list(ids)[: self.cacheable_len(len(ids))])
    patch.setattr(PrefixCache, "cacheable_len", lambda self, n: n // self.page_size * self.page_size)

    def prefixes(self: MemoryModel, ids: list[int]) -> list[tuple[object, ...]]:
        size = self.shape.page_size
        return [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]

    patch.setattr(MemoryModel, "_prefixes", prefixes)
    patch.setattr(
        MemoryModel,
        "_to_insert",
        lambda self, request: (request.ids[: request.draft_len], request.slots[: request.draft_len]),
    )
    original = MemoryModel._match
    patch.setattr(MemoryModel, "_match", lambda self, ids: original(self, ids[:-1] if len(ids) > 1 else ids))
    patch.setattr(MemoryModel, "publish", lambda self, a, b, c: None)


def begun_pages_are_left(patch: Patch) -> None:
    """Every extension starts a new page."""
    original = SlotAllocator.alloc_extend

    def alloc_extend(
        self: SlotAllocator, prefix_lens: list[int], seq_lens: list[int], last_slots: torch.Tensor
    ) -> torch.Tensor:
        return original(
            self, [0] * len(prefix_lens), [s - p for p, s in zip(prefix_lens, seq_lens, strict=True)], last_slots
        )

    patch.setattr(SlotAllocator, "alloc_extend", alloc_extend)


def pages_are_freed_once_for_each_slot(patch: Patch) -> None:
    original = SlotAllocator.free

    def free(self: SlotAllocator, slots: torch.Tensor) -> None:
        original(self, slots)
        extra = len(slots) - len(torch.unique(slots // self.page_size))
        self._put(self.free_pages[len(self.free_pages) - extra :])

    patch.setattr(SlotAllocator, "free", free)


def rollback_to_the_wrong_order(patch: Patch) -> None:
    original = SlotAllocator.restore_state

    def restore_state(self: SlotAllocator, state: AllocatorState) -> None:
        free = state.free_pages.sort(descending=True).values
        original(self, AllocatorState(free, 0, len(free)))

    patch.setattr(SlotAllocator, "restore_state", restore_state)


def rollback_forgets_who_owns(patch: Patch) -> None:
    original = SlotAllocator.restore_state

    def restore_state(self: SlotAllocator, state: AllocatorState) -> None:
        owned = self.owned.clone()
        original(self, state)
        self.owned = owned

    patch.setattr(SlotAllocator, "restore_state", restore_state)


def eviction_before_a_rollback(patch: Patch) -> None:
    """The scheduler's fault: the snapshot is older than the eviction."""
    original = MemoryModel._draft

    def draft(self: MemoryModel, request: ModelRequest) -> bool:
        state = self.allocator.backup_state()
        if self._evict(1):
            self.allocator.restore_state(state)
        return original(self, request)

    patch.setattr(MemoryModel, "_draft", draft)


def rejected_pages_are_freed_whole(patch: Patch) -> None:
    """The scheduler's fault: without `align_evict_mask_to_page_size`."""
    patch.setattr("memory_model.align_evict_mask_to_page_size", lambda *arguments: None)


def what_the_draft_never_read_is_cached(patch: Patch) -> None:
    """The scheduler's fault: the last block of a finished request has no draft rows."""
    patch.setattr(
        MemoryModel,
        "_to_insert",
        lambda self, request: (request.ids[: request.kv_len + 1], request.slots[: request.kv_len]),
    )


def duplicates_are_not_freed(patch: Patch) -> None:
    """The scheduler's fault."""
    original = MemoryModel._insert

    def insert(self: MemoryModel, ids: list[int], slots: list[int]) -> int:
        original(self, ids, slots)
        return min(r.matched for r in self.running)

    patch.setattr(MemoryModel, "_insert", insert)


def reserve_is_not_released(patch: Patch) -> None:
    """The scheduler's fault: what is released is counted from the committed tokens, not from the allocated slots."""
    original = MemoryModel._end

    def end(self: MemoryModel, request: ModelRequest, insert: bool) -> None:
        del request.slots[request.kv_len :]
        original(self, request, insert)

    patch.setattr(MemoryModel, "_end", end)


# Each with the function that complains: the check of the allocator, of the tree or of the model, or the oracle's own.
FAULTS = {
    split_loses_slots: "check",
    split_forgets_the_lock: "_check_node",
    split_within_a_page: "_match",
    eviction_ignores_locks: "_evict",
    eviction_stops_at_the_first_leaves: "_evict",
    eviction_takes_the_newest: "_evict",
    eviction_frees_nothing: "_evict",
    a_match_is_no_use: "_check_node",
    insert_takes_duplicates: "_match",
    insert_says_that_it_had_nothing: "_insert",
    unlock_stops_at_the_node: "_check_node",
    locks_do_not_count_as_protected: "check",
    plain_keys_for_a_draft: "check",
    begun_pages_are_left: "_draft",
    pages_are_freed_once_for_each_slot: "check",
    rollback_to_the_wrong_order: "_draft",
    rollback_forgets_who_owns: "check",
    eviction_before_a_rollback: "check",
    rejected_pages_are_freed_whole: "check",
    what_the_draft_never_read_is_cached: "check",
    duplicates_are_not_freed: "check",
    reserve_is_not_released: "check",
}


@pytest.mark.parametrize(("fault", "where"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])
def test_a_fault_is_noticed(fault: Callable[[Patch], None], where: str, monkeypatch: Patch) -> None:
    """In one of the shapes, within a thousand steps."""

    def drive_all() -> None:
        for shape in SHAPES:
            drive(MemoryModel(shape), 1000, seed=5)

    fault(monkeypatch)
    with pytest.raises(AssertionError) as noticed:
        drive_all()
    assert traceback.extract_tb(noticed.tb)[-1].name == where
