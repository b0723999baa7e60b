"""Who owns which slot: taken and returned in order, never twice, never slot 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refspec.memory.allocator import AllocatorState, IntegrityError, OutOfSlots, SlotAllocator

CPU = torch.device("cpu")


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_slots_are_given_out_in_order_and_reused_in_the_order_of_their_return() -> None:
    allocator = SlotAllocator(6, CPU)
    assert allocator.alloc(4).tolist() == [1, 2, 3, 4]
    allocator.free(slots(3, 1))
    assert allocator.alloc(4).tolist() == [5, 6, 3, 1]
    assert allocator.available() == 0


@pytest.mark.parametrize("size", [1, 8])
def test_MEM_12_slot_0_is_the_dummy(size: int) -> None:
    """Size N: N slots are there to be had, 1..N; 0 is none of them."""
    allocator = SlotAllocator(size, CPU)
    assert allocator.available() == size
    assert allocator.alloc(size).tolist() == list(range(1, size + 1))
    assert allocator.available() == 0


def test_MEM_12_the_dummy_cannot_be_freed() -> None:
    with pytest.raises(IntegrityError, match=r"\[0\]"):
        SlotAllocator(8, CPU).free(slots(0))


def test_slots_come_as_i64_on_the_device_of_the_pool() -> None:
    taken = SlotAllocator(3, CPU).alloc(2)
    assert (taken.dtype, taken.device) == (torch.int64, CPU)


@pytest.mark.parametrize("free", [0, 3])
def test_asking_for_more_than_is_free_takes_nothing(free: int) -> None:
    allocator = SlotAllocator(5, CPU)
    allocator.alloc(5 - free)
    with pytest.raises(OutOfSlots, match=f"4 KV slots are needed, {free} of 5 are free"):
        allocator.alloc(4)
    assert allocator.available() == free
    assert allocator.taken == 5 - free


def test_taking_none_is_allowed() -> None:
    allocator = SlotAllocator(2, CPU)
    assert allocator.alloc(0).tolist() == []
    allocator.free(slots())
    assert allocator.available() == 2


@pytest.mark.parametrize(
    ("given_back", "why"),
    [
        ([3, 3], "the same slot twice in one call"),
        ([5], "a slot that is free"),
        ([2, 5], "one that is owned and one that is free"),
        ([0], "the dummy"),
        ([2, 0], "the dummy among others"),
    ],
)
def test_MEM_06_wrong_free_is_refused_whole(given_back: list[int], why: str) -> None:
    allocator = SlotAllocator(8, CPU)
    allocator.alloc(4)
    with pytest.raises(IntegrityError, match=str(given_back[-1])):
        allocator.free(slots(*given_back))
    assert allocator.available() == 4
    assert allocator.returned == 0
    allocator.check([("its owner", slots(1, 2, 3, 4))])


@pytest.mark.parametrize("stray", [-1, -3, 9, 100])
def test_MEM_06_number_that_is_no_slot_is_refused(stray: int) -> None:
    """Indexing would take -1 for the last slot; nothing of the call may have happened."""
    allocator = SlotAllocator(8, CPU)
    allocator.alloc(8)
    with pytest.raises((IntegrityError, IndexError)):
        allocator.free(slots(1, stray))
    assert allocator.available() == 0
    allocator.free(slots(*range(1, 9)))
    allocator.check([])


def test_MEM_06_double_free_gives_no_slot_two_owners() -> None:
    """Size 8: take 4, free slot 3, free slot 3 again."""
    allocator = SlotAllocator(8, CPU)
    allocator.alloc(4)
    allocator.free(slots(3))
    with pytest.raises(IntegrityError):
        allocator.free(slots(3))
    assert allocator.available() == 5
    assert sorted(allocator.alloc(5).tolist()) == [3, 5, 6, 7, 8]


def test_MEM_03_backup_and_restore() -> None:
    """Free list 1..16: snapshot, take 6, restore, restore again, take 6."""
    allocator = SlotAllocator(16, CPU)
    state = allocator.backup_state()
    allocator.alloc(6)
    for _ in range(2):
        allocator.restore_state(state)
        assert allocator.free_slots.tolist() == list(range(1, 17))
    assert allocator.alloc(6).tolist() == [1, 2, 3, 4, 5, 6]
    assert state.free_slots.tolist() == list(range(1, 17))


def test_MEM_03_snapshot_of_a_pool_in_use() -> None:
    """What was owned at the snapshot is owned again after the restore, and only that."""
    allocator = SlotAllocator(16, CPU)
    allocator.alloc(5)
    allocator.free(slots(4, 2))
    state, order = allocator.backup_state(), allocator.free_slots.tolist()
    allocator.free(slots(1))
    allocator.alloc(9)
    allocator.restore_state(state)
    assert allocator.free_slots.tolist() == order
    allocator.check([("owner", slots(1, 3, 5))])
    with pytest.raises(IntegrityError):
        allocator.free(slots(2))
    allocator.free(slots(1, 3, 5))
    allocator.check([])


def test_MEM_03_snapshot_shares_nothing_with_the_live_list() -> None:
    allocator = SlotAllocator(4, CPU)
    state = allocator.backup_state()
    allocator.free_slots[0] = 99
    allocator.owned[1] = True
    assert state.free_slots.tolist() == [1, 2, 3, 4]
    allocator.restore_state(state)
    allocator.free_slots[0] = 99
    allocator.owned[1] = True
    allocator.restore_state(state)
    assert allocator.free_slots.tolist() == [1, 2, 3, 4]
    assert not allocator.owned.any()


def test_counters_follow_taking_returning_and_restoring() -> None:
    allocator = SlotAllocator(9, CPU)
    allocator.alloc(2)
    state = allocator.backup_state()
    allocator.alloc(5)
    allocator.restore_state(state)
    allocator.free(slots(1))
    assert (allocator.taken, allocator.returned) == (7, 6)


# --- the check ----------------------------------------------------------------------------------------------------


def test_check_passes_when_every_slot_has_one_holder() -> None:
    allocator = SlotAllocator(4, CPU)
    allocator.alloc(3)
    allocator.check([("request 0", slots(1, 3)), ("request 1", slots(2))])


@pytest.mark.parametrize(
    ("owners", "complaint"),
    [
        ([("request 0", [1, 2])], r"1 of 4 slots are held by nobody, the first: \[3\]"),
        ([("request 0", [1, 2, 3]), ("request 1", [3])], "slot 3 is held by request 0 and by request 1"),
        ([("request 0", [1, 2, 3, 3])], "slot 3 is held by request 0 and by request 0"),
        ([("request 0", [1, 2, 3, 4])], "slot 4 is held by the free list and by request 0"),
        ([("request 0", [1, 2, 3, 0])], "slot 0 is held by the dummy slot and by request 0"),
        ([("request 0", [1, 2, 3, 7])], "7"),
        ([("request 0", [1, 2, 3, -1])], "-1"),
    ],
)
def test_check_names_the_slot_and_its_holders(owners: list[tuple[str, list[int]]], complaint: str) -> None:
    allocator = SlotAllocator(4, CPU)
    allocator.alloc(3)
    with pytest.raises(IntegrityError, match=complaint):
        allocator.check([(name, slots(*held)) for name, held in owners])


def test_pool_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        SlotAllocator(0, CPU)


# --- any sequence of calls ----------------------------------------------------------------------------------------


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator beside plain Python lists, through whatever sequence of calls."""

    @initialize(size=st.integers(1, 12))
    def make(self, size: int) -> None:
        self.allocator = SlotAllocator(size, CPU)
        self.free, self.owned = list(range(1, size + 1)), list[int]()
        self.snapshot: tuple[AllocatorState, list[int], list[int]] | None = None

    @rule(count=st.integers(0, 13))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfSlots):
                self.allocator.alloc(count)
            return
        assert self.allocator.alloc(count).tolist() == self.free[:count]
        self.owned += self.free[:count]
        self.free = self.free[count:]

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.owned), unique=True))
        self.allocator.free(slots(*some))
        self.free += some
        self.owned = [slot for slot in self.owned if slot not in some]

    @rule(data=st.data())
    def give_back_what_is_not_owned(self, data: st.DataObject) -> None:
        stray = data.draw(st.sampled_from([0, *self.free]))
        some = data.draw(st.permutations([*self.owned[:2], stray]))
        with pytest.raises(IntegrityError):
            self.allocator.free(slots(*some))

    @rule()
    def back_up(self) -> None:
        self.snapshot = self.allocator.backup_state(), list(self.free), list(self.owned)

    @precondition(lambda self: self.snapshot)
    @rule()
    def restore(self) -> None:
        assert self.snapshot is not None
        state, free, owned = self.snapshot
        self.allocator.restore_state(state)
        self.free, self.owned = list(free), list(owned)

    @invariant()
    def agrees_with_the_lists(self) -> None:
        assert self.allocator.free_slots.tolist() == self.free
        assert self.allocator.available() == len(self.free)
        assert self.allocator.owned.nonzero().flatten().tolist() == sorted(self.owned)
        assert self.allocator.taken - self.allocator.returned == len(self.owned)
        self.allocator.check([("owner", slots(*self.owned))])


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=25)
