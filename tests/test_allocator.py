"""Who owns which slot, or which page of slots: taken and returned in order, never twice, never the dummy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensor_bytes import TensorBytes

from refspec.kernels import align_evict_mask_to_page_size
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
    assert state.free_pages.tolist() == list(range(1, 17))


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


def test_MEM_03_snapshot_keeps_what_it_saw_whatever_comes_after() -> None:
    """Pages freed after a restore must not take the place of those that a later snapshot saw."""
    allocator = SlotAllocator(4, CPU)
    allocator.alloc(3)
    early = allocator.backup_state()
    allocator.free(slots(3, 1))
    late = allocator.backup_state()
    for _ in range(3):
        allocator.restore_state(early)
        assert allocator.free_slots.tolist() == [4]
        allocator.free(slots(2))
        assert late.free_pages.tolist() == [4, 3, 1]
        allocator.restore_state(late)
        assert allocator.free_slots.tolist() == [4, 3, 1]
        allocator.check([("owner", slots(2))])
    assert early.free_pages.tolist() == [4]


def test_MEM_03_snapshot_outlives_its_queue() -> None:
    """Many more pages are freed than there are: the free list has moved on, and comes back."""
    allocator = SlotAllocator(4, CPU)
    owned = allocator.alloc(1)
    state = allocator.backup_state()
    for _ in range(20):
        allocator.free(allocator.alloc(2))
    allocator.free(owned)
    allocator.restore_state(state)
    assert allocator.free_slots.tolist() == [2, 3, 4]
    allocator.check([("owner", slots(1))])
    allocator.free(slots(1))
    assert (state.free_pages.tolist(), allocator.free_slots.tolist()) == ([2, 3, 4], [2, 3, 4, 1])


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_call_touches_more_of_a_pool_than_it_is_about(page_size: int) -> None:
    """Bytes that the operations of a round's calls write, in a small pool and in a thousand times as large a one."""

    def written(size: int) -> int:
        allocator = SlotAllocator(size, CPU, page_size)
        kept = allocator.alloc(8)
        allocator.free(allocator.alloc(16))
        with TensorBytes() as counted:
            for _ in range(2):
                state = allocator.backup_state()
                allocator.alloc(16)
                allocator.restore_state(state)
                allocator.free(allocator.alloc(8))
        allocator.check([("owner", kept)])
        return counted.total

    assert 0 < written(128_000) == written(128)


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


# --- pages --------------------------------------------------------------------------------------------------------


def extend(allocator: SlotAllocator, held: list[int], until: int) -> list[int]:
    """One request's slots, and more of them up to position `until`."""
    last = slots(*held[-1:]) if held else slots(0)
    return held + allocator.alloc_extend([len(held)], [until], last).tolist()


def free_rejected(allocator: SlotAllocator, held: list[int], committed: int) -> int:
    """Give back what lies behind the committed tokens and shares no page with one. Returns how many slots it named."""
    mask = torch.ones(1, len(held) - committed, dtype=torch.bool)
    align_evict_mask_to_page_size(torch.tensor([committed]), mask, allocator.page_size, "torch")
    evicted = slots(*held[committed:])[mask[0]]
    allocator.free(evicted)
    return len(evicted)


@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_MEM_12_page_0_is_the_dummy(page_size: int) -> None:
    allocator = SlotAllocator(2 * page_size, CPU, page_size)
    assert allocator.available() == 2 * page_size
    assert allocator.alloc(2 * page_size).tolist() == list(range(page_size, 3 * page_size))
    allocator.check([("owner", slots(*range(page_size, 3 * page_size)))])
    with pytest.raises(IntegrityError, match="no slots of this pool"):
        allocator.free(slots(page_size - 1))
    with pytest.raises(IntegrityError, match="the dummy slot"):
        allocator.check([("owner", slots(page_size - 1))])


@pytest.mark.parametrize(("size", "page_size"), [(10, 4), (3, 4), (8, 0), (8, -2)])
def test_pages_that_do_not_divide_the_pool_are_refused(size: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"a KV pool of {size} slots cannot be cut into pages of {page_size}"):
        SlotAllocator(size, CPU, page_size)


def test_alloc_takes_whole_pages() -> None:
    allocator = SlotAllocator(16, CPU, 4)
    with pytest.raises(ValueError, match="6 slots are not whole pages of 4"):
        allocator.alloc(6)
    assert allocator.alloc(8).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(OutOfSlots, match="12 KV slots are needed, 8 of 16 are free"):
        allocator.alloc(12)
    assert (allocator.available(), allocator.taken) == (8, 8)


def test_an_extension_fills_the_begun_page_first() -> None:
    allocator = SlotAllocator(32, CPU, 4)
    held = extend(allocator, [], 6)
    assert held == [4, 5, 6, 7, 8, 9]
    allocator.alloc(4)
    assert allocator.slots_to_extend([6], [8]) == 0
    held = extend(allocator, held, 8)
    assert held[6:] == [10, 11]
    assert allocator.slots_to_extend([8], [13]) == 8
    assert extend(allocator, held, 13)[8:] == [16, 17, 18, 19, 20]
    assert allocator.available() == 32 - 8 - 4 - 8


def test_requests_of_one_extension_get_pages_of_their_own() -> None:
    """One in the middle of a page, one at the end of one, one without tokens, one that is not extended."""
    allocator = SlotAllocator(64, CPU, 4)
    requests = [extend(allocator, [], n) for n in (5, 8, 0, 3)]
    free = allocator.available()
    lens, until = [5, 8, 0, 3], [10, 9, 4, 3]
    new = allocator.alloc_extend(lens, until, slots(*(held[-1] if held else -1 for held in requests))).tolist()
    assert allocator.available() == free - allocator.slots_to_extend(lens, until) == free - 12
    for held, n, m in zip(requests, lens, until, strict=True):
        held += new[: m - n]
        new = new[m - n :]
        assert [slot % 4 for slot in held] == [position % 4 for position in range(m)]
        assert len({slot // 4 for slot in held}) == (m + 3) // 4
    allocator.check([(f"request {r}", slots(*held)) for r, held in enumerate(requests)])


def test_a_decode_step_takes_a_page_when_the_last_one_is_full() -> None:
    allocator = SlotAllocator(16, CPU, 4)
    held: list[int] = []
    for length in range(1, 10):
        held = extend(allocator, held, length)
        assert allocator.available() == 16 - (length + 3) // 4 * 4
    assert held == list(range(4, 13))


def test_an_extension_that_does_not_fit_takes_nothing() -> None:
    allocator = SlotAllocator(8, CPU, 4)
    held = extend(allocator, [], 6)
    with pytest.raises(OutOfSlots, match="4 KV slots are needed, 0 of 8 are free"):
        extend(allocator, held, 9)
    assert (allocator.available(), allocator.taken) == (0, 8)
    assert len(extend(allocator, held, 8)) == 8


@pytest.mark.parametrize(("lens", "until"), [([3], [2]), ([-1], [2]), ([4, 5], [5, 4])])
def test_lengths_that_shrink_are_refused(lens: list[int], until: list[int]) -> None:
    allocator = SlotAllocator(32, CPU, 4)
    with pytest.raises(ValueError, match="cannot be extended to"):
        allocator.alloc_extend(lens, until, slots(*lens))
    assert allocator.available() == 32


@pytest.mark.parametrize("last", [5, 7, 14, 2, 34, 130, -1])
def test_a_last_slot_that_is_none_is_noticed(last: int) -> None:
    """Of three tokens in one page the last has the third slot, 6 here. Others, of free pages or of none, are wrong."""
    allocator = SlotAllocator(32, CPU, 4)
    assert extend(allocator, [], 3) == [4, 5, 6]
    with pytest.raises(IntegrityError, match="do not hold the tokens at positions"):
        allocator.alloc_extend([3], [9], slots(last))
    assert allocator.available() == 28


def test_a_page_is_freed_once_by_any_of_its_slots() -> None:
    allocator = SlotAllocator(16, CPU, 4)
    allocator.alloc(16)
    allocator.free(slots(5, 9, 4, 7))
    assert allocator.free_slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert allocator.returned == 8
    allocator.check([("owner", slots(12, 19))])


@pytest.mark.parametrize(
    ("given_back", "why"),
    [
        ([5, 5], "the same slot twice in one call"),
        ([8, 12], "one page that is owned and one that is free"),
        ([13], "a slot of a page that is free"),
        ([3, 5], "the dummy page"),
        ([5, 20], "behind the pool"),
    ],
)
def test_MEM_06_wrong_free_of_pages_is_refused_whole(given_back: list[int], why: str) -> None:
    allocator = SlotAllocator(16, CPU, 4)
    allocator.alloc(8)
    with pytest.raises(IntegrityError, match=str(given_back[-1])):
        allocator.free(slots(*given_back))
    assert (allocator.available(), allocator.returned) == (8, 0)
    allocator.check([("its owner", slots(4, 8))])


def test_MEM_06_the_same_page_by_two_of_its_slots() -> None:
    allocator = SlotAllocator(16, CPU, 4)
    allocator.alloc(8)
    allocator.free(slots(5))
    with pytest.raises(IntegrityError):
        allocator.free(slots(6))
    assert allocator.available() == 12
    assert sorted(allocator.alloc(12).tolist()) == [4, 5, 6, 7, *range(12, 20)]


def test_MEM_03_backup_and_restore_of_pages() -> None:
    """The draft's branches take the rest of the begun page and new ones; the rollback leaves the begun one alone."""
    allocator = SlotAllocator(64, CPU, 4)
    held = extend(allocator, [], 10)
    state, free = allocator.backup_state(), allocator.free_slots.tolist()
    for _ in range(2):
        assert extend(allocator, held, 24)[10:] == list(range(14, 28))
        allocator.restore_state(state)
        assert allocator.free_slots.tolist() == free
        allocator.check([("request", slots(*held))])
    assert allocator.taken - allocator.returned == 12


def test_MEM_01_no_request_leaks_its_reserve() -> None:
    """Page 4, pool 64: prompt 5, 3 new tokens, 20 times; the rounds' nodes are allocated, and kept as a reserve."""
    allocator = SlotAllocator(64, CPU, 4)
    for _ in range(20):
        held, committed = extend(allocator, [], 5), 5
        for accepted in (1, 2):
            held = extend(allocator, held, max(len(held), committed + 4))
            committed += accepted
            assert committed <= len(held)
        allocator.free(slots(*held))
        assert allocator.available() == 64


@pytest.mark.parametrize("named", ["every slot", "one slot of each page"])
def test_MEM_02_release_counts_allocated_slots(named: str) -> None:
    """Page 4, prompt 6, 1 token committed, reserve up to 12: 3 pages come back, each once."""
    allocator = SlotAllocator(64, CPU, 4)
    held = extend(allocator, extend(allocator, [], 7), 12)
    before = allocator.available()
    allocator.free(slots(*(held if named == "every slot" else held[::4])))
    assert (allocator.available() - before, allocator.returned) == (12, 12)
    allocator.check([])


def test_MEM_07_the_page_that_the_last_committed_token_shares_is_not_freed() -> None:
    """Page 4, length 6, verify slots at 6..9, the root kept: one page is freed, and 7 is not in it."""
    allocator = SlotAllocator(64, CPU, 4)
    held = extend(allocator, extend(allocator, [], 6), 10)
    before = allocator.available()
    assert free_rejected(allocator, held, committed=7) == 2
    assert allocator.available() == before + 4
    allocator.check([("the kept", slots(*held[:7]))])
    assert extend(allocator, held[:7], 8)[7:] == held[7:8]


@pytest.mark.parametrize(
    ("length", "nodes", "kept", "named", "keep_up_to"),
    [(10, 8, 3, 2, 16), (10, 8, 2, 6, 12), (7, 4, 1, 3, 8)],
    ids=["a", "b", "c"],
)
def test_PAGE_04_what_is_kept_ends_with_its_page(
    length: int, nodes: int, kept: int, named: int, keep_up_to: int
) -> None:
    allocator = SlotAllocator(64, CPU, 4)
    held = extend(allocator, extend(allocator, [], length), length + nodes)
    assert free_rejected(allocator, held, committed=length + kept) == named
    assert 64 - allocator.available() == keep_up_to
    allocator.check([("the kept", slots(*held[: length + kept]))])


def test_check_knows_pages() -> None:
    allocator = SlotAllocator(16, CPU, 4)
    allocator.alloc(8)
    allocator.check([("a", slots(4, 6)), ("b", slots(9))])
    with pytest.raises(IntegrityError, match="the page of slot 5 is held by a and by b"):
        allocator.check([("a", slots(4)), ("b", slots(5, 8))])
    with pytest.raises(IntegrityError, match="slot 8 is held by b and by b"):
        allocator.check([("a", slots(4)), ("b", slots(8, 8))])
    with pytest.raises(IntegrityError, match=r"4 of 16 slots are held by nobody, the first: \[8, 9, 10, 11\]"):
        allocator.check([("a", slots(4))])
    with pytest.raises(IntegrityError, match=r"a holds 20, which is no slot of this pool \(4 to 19\)"):
        allocator.check([("a", slots(4, 8, 20))])


def test_check_compares_the_free_list_with_what_is_owned() -> None:
    allocator = SlotAllocator(4, CPU)
    allocator.owned[3] = True
    with pytest.raises(IntegrityError, match="free and count as owned"):
        allocator.check([])


# --- any sequence of calls ----------------------------------------------------------------------------------------


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator beside plain Python lists, through whatever sequence of calls."""

    @initialize(size=st.integers(1, 12))
    def make(self, size: int) -> None:
        self.allocator = SlotAllocator(size, CPU)
        self.free, self.owned = list(range(1, size + 1)), list[int]()
        self.snapshots: list[tuple[AllocatorState, list[int], list[int]]] = []

    @rule(lens=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3))
    def extend(self, lens: list[tuple[int, int]]) -> None:
        """On single slots an extension is an alloc, whatever the last slots are said to be."""
        prefix_lens, seq_lens = [n for n, _ in lens], [n + more for n, more in lens]
        count = self.allocator.slots_to_extend(prefix_lens, seq_lens)
        assert count == sum(more for _, more in lens)
        if count <= len(self.free):
            last = slots(*(-1 for _ in lens))
            assert self.allocator.alloc_extend(prefix_lens, seq_lens, last).tolist() == self.free[:count]
            self.owned += self.free[:count]
            self.free = self.free[count:]

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
        self.snapshots.append((self.allocator.backup_state(), list(self.free), list(self.owned)))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        state, free, owned = data.draw(st.sampled_from(self.snapshots))
        self.allocator.restore_state(state)
        self.free, self.owned = list(free), list(owned)

    @invariant()
    def agrees_with_the_lists(self) -> None:
        assert self.allocator.free_slots.tolist() == self.free
        assert self.allocator.available() == len(self.free)
        assert self.allocator.owned.nonzero().flatten().tolist() == sorted(self.owned)
        assert self.allocator.taken - self.allocator.returned == len(self.owned)
        self.allocator.check([("owner", slots(*self.owned))])
        for state, free, _ in self.snapshots:
            assert state.free_pages.tolist() == free


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=300, stateful_step_count=40)
