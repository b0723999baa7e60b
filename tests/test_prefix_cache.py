"""The radix tree over slots: what is found, what is taken over, what is split, locked and evicted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refspec.memory.allocator import IntegrityError, SlotAllocator
from refspec.memory.prefix_cache import PrefixCache, TreeNode

CPU = torch.device("cpu")


def cache_of(size: int = 64, page_size: int = 1, reads_ahead: int = 0) -> PrefixCache:
    return PrefixCache(SlotAllocator(size, CPU, page_size), reads_ahead)


def put(cache: PrefixCache, ids: list[int], *locked: TreeNode) -> list[int]:
    """As a request does that finds what is there, computes the rest and ends. Returns the slots that it used.

    locked: the nodes that others hold.
    """
    match = cache.match_prefix(ids)
    cache.inc_lock_ref(match.node)
    found = len(match.slots)
    new = cache.allocator.alloc_extend([found], [len(ids)], torch.zeros(1, dtype=torch.int64))
    slots = torch.cat([match.slots, new])
    had = cache.insert(ids, slots)
    cache.allocator.free(torch.cat([slots[found:had], slots[cache.cacheable_len(len(ids)) :]]))
    cache.dec_lock_ref(match.node)
    cache.check(locked)
    cache.allocator.check([("the cache", cache.held_slots())])
    return slots.tolist()


def found(cache: PrefixCache, ids: list[int]) -> list[int]:
    return cache.match_prefix(ids).slots.tolist()


def runs(cache: PrefixCache) -> list[list[object]]:
    """The keys of all nodes, sorted."""
    return sorted((list(node.key) for node in cache._nodes()), key=repr)


# --- match and insert ---------------------------------------------------------------------------------------------


def test_an_empty_cache_finds_nothing() -> None:
    cache = cache_of()
    slots, node = cache.match_prefix([1, 2, 3])
    assert (slots.tolist(), slots.dtype, node) == ([], torch.int64, cache.root)
    assert found(cache, []) == []


def test_the_longest_cached_prefix_is_found() -> None:
    cache = cache_of()
    slots = put(cache, [1, 2, 3, 4])
    assert found(cache, [1, 2, 3, 4, 5, 6]) == slots
    assert found(cache, [1, 2, 9]) == slots[:2]
    assert found(cache, [2, 3]) == []


def test_two_prefixes_share_what_they_have_in_common() -> None:
    cache = cache_of()
    first, second = put(cache, [1, 2, 3, 4]), put(cache, [1, 2, 5])
    assert second[:2] == first[:2]
    assert runs(cache) == [[1, 2], [3, 4], [5]]
    assert (cache.evictable_size, cache.allocator.available()) == (5, 59)


def test_insert_says_what_was_there_and_takes_only_the_rest() -> None:
    cache = cache_of()
    mine, theirs = cache.allocator.alloc(3), cache.allocator.alloc(5)
    assert cache.insert([1, 2, 3], mine) == 0
    assert cache.insert([1, 2, 3, 4, 5], theirs) == 3
    assert found(cache, [1, 2, 3, 4, 5]) == [*mine.tolist(), *theirs[3:].tolist()]
    cache.allocator.check([("the cache", cache.held_slots()), ("the second request", theirs[:3])])
    assert cache.insert([1, 2], theirs[:2]) == 2


def test_the_tree_keeps_slots_of_its_own() -> None:
    """Not a view of a row of the request table, which others will write to."""
    cache, row = cache_of(), torch.zeros(8, dtype=torch.int64)
    row[:3] = cache.allocator.alloc(3)
    cache.insert([7, 8, 9], row[:3])
    row.zero_()
    assert found(cache, [7, 8, 9]) == [1, 2, 3]
    slots = cache.match_prefix([7, 8]).slots
    slots.zero_()
    assert found(cache, [7, 8, 9]) == [1, 2, 3]


def test_a_key_needs_a_slot_for_each_token() -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="2 slots for a key of 3 tokens"):
        cache.insert([1, 2, 3], cache.allocator.alloc(2))
    assert runs(cache) == []


def test_a_match_splits_the_node_that_it_ends_in() -> None:
    """So that the part that is read can be locked, and the rest evicted."""
    cache = cache_of()
    slots = put(cache, [1, 2, 3, 4])
    match = cache.match_prefix([1, 2])
    assert runs(cache) == [[1, 2], [3, 4]]
    cache.inc_lock_ref(match.node)
    assert (cache.protected_size, cache.evictable_size) == (2, 2)
    assert cache.evict(64) == 2
    assert found(cache, [1, 2, 3, 4]) == slots[:2]


# --- pages --------------------------------------------------------------------------------------------------------


def test_keys_and_matches_are_whole_pages() -> None:
    cache = cache_of(page_size=4)
    slots = put(cache, list(range(10)))
    assert (cache.cacheable_len(10), cache.evictable_size) == (8, 8)
    assert found(cache, [*range(7), 99]) == slots[:4]
    assert found(cache, [0, 1, 2]) == []
    assert found(cache, list(range(10))) == slots[:8]


def test_prefixes_that_part_within_a_page_share_none_of_it() -> None:
    cache = cache_of(page_size=4)
    first = put(cache, [0, 1, 2, 3, 4, 5, 6, 7])
    second = put(cache, [0, 1, 2, 3, 4, 5, 9, 9])
    assert first[:4] == second[:4]
    assert set(first[4:]).isdisjoint(second[4:])
    assert runs(cache) == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 9, 9]]
    assert cache.evictable_size == 12


def test_slots_that_are_not_whole_pages_are_noticed() -> None:
    cache = cache_of(size=16, page_size=4)
    slots = cache.allocator.alloc(8)
    cache.insert([1, 2, 3, 4], slots[2:6])
    with pytest.raises(IntegrityError, match="are not whole pages of 4"):
        cache.check()


# --- locks --------------------------------------------------------------------------------------------------------


def test_a_lock_protects_the_whole_path_and_counts() -> None:
    cache = cache_of()
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5])
    deep = cache.match_prefix([1, 2, 5]).node
    cache.inc_lock_ref(deep)
    cache.inc_lock_ref(deep)
    assert (cache.protected_size, cache.evictable_size) == (3, 2)
    cache.check([deep, deep])
    cache.dec_lock_ref(deep)
    assert cache.evict(64) == 2
    assert cache.protected_size == 3
    cache.dec_lock_ref(deep)
    assert (cache.protected_size, cache.evictable_size) == (0, 3)
    assert cache.evict(64) == 3


def test_a_locked_node_stays_whole_to_its_holder_when_it_is_split() -> None:
    cache = cache_of()
    slots = put(cache, [1, 2, 3, 4])
    holder = cache.match_prefix([1, 2, 3, 4]).node
    cache.inc_lock_ref(holder)
    put(cache, [1, 9], holder)
    assert runs(cache) == [[1], [2, 3, 4], [9]]
    cache.check([holder])
    assert cache.evict(64) == 1
    assert found(cache, [1, 2, 3, 4]) == slots
    cache.dec_lock_ref(holder)
    assert cache.evict(64) == 4


def test_the_root_can_be_locked_by_whoever_found_nothing() -> None:
    cache = cache_of()
    node = cache.match_prefix([1]).node
    cache.inc_lock_ref(node)
    cache.check([node])
    cache.dec_lock_ref(node)
    assert cache.protected_size == 0


def test_unlocking_too_often_is_noticed() -> None:
    cache = cache_of()
    put(cache, [1, 2])
    with pytest.raises(IntegrityError, match="unlocked more often than locked"):
        cache.dec_lock_ref(cache.match_prefix([1, 2]).node)
    cache.check()


def test_a_node_that_was_evicted_before_it_was_locked_is_noticed() -> None:
    cache = cache_of()
    put(cache, [1, 2])
    node = cache.match_prefix([1, 2]).node
    cache.evict(2)
    with pytest.raises(IntegrityError, match="evicted before it was locked"):
        cache.inc_lock_ref(node)


# --- eviction -----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_of()
    for first in (1, 2, 3):
        put(cache, [first, 0])
    cache.match_prefix([1, 0])
    assert cache.evict(1) == 2
    assert [len(found(cache, [first, 0])) for first in (1, 2, 3)] == [2, 0, 2]
    assert cache.evict(1) == 2
    assert [len(found(cache, [first, 0])) for first in (1, 2, 3)] == [0, 0, 2]


def test_a_parent_goes_after_its_last_child_and_only_if_needed() -> None:
    cache = cache_of()
    put(cache, [1, 2, 3])
    put(cache, [1, 4])
    assert runs(cache) == [[1], [2, 3], [4]]
    assert cache.evict(3) == 3
    assert runs(cache) == [[1]]
    assert cache.evict(1) == 1
    assert cache.allocator.available() == 64


def test_evicted_slots_can_be_had_again() -> None:
    cache = cache_of(size=8, page_size=2)
    put(cache, [1, 2, 3, 4])
    put(cache, [5, 6, 7, 8])
    assert cache.allocator.available() == 0
    assert cache.evict(0) == 0
    assert cache.evict(3) == 4
    cache.allocator.alloc(4)
    assert cache.evict(64) == 4
    assert cache.evict(64) == 0


def test_all_is_evicted_but_what_is_locked() -> None:
    cache = cache_of()
    put(cache, [1, 2, 3])
    put(cache, [1, 5])
    node = cache.match_prefix([1, 5]).node
    cache.inc_lock_ref(node)
    assert (cache.evict(64), cache.protected_size) == (2, 2)
    cache.dec_lock_ref(node)
    assert cache.evict(64) == 2
    assert (cache.allocator.available(), runs(cache), cache.evictable_size) == (64, [], 0)
    cache.check()


# --- the check ----------------------------------------------------------------------------------------------------


def break_children(cache: PrefixCache, node: TreeNode) -> None:
    cache.root.children[(99,)] = cache.root.children.pop((1,))


def break_parent(cache: PrefixCache, node: TreeNode) -> None:
    node.parent = None


def break_length(cache: PrefixCache, node: TreeNode) -> None:
    node.slots = node.slots[:1]


def break_locks(cache: PrefixCache, node: TreeNode) -> None:
    node.lock_ref += 1


def break_size(cache: PrefixCache, node: TreeNode) -> None:
    cache.evictable_size += 1


def break_slots(cache: PrefixCache, node: TreeNode) -> None:
    node.slots[0] = node.slots[1]


def break_time(cache: PrefixCache, node: TreeNode) -> None:
    node.last_used = cache.clock + 1


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (break_children, r"a child under \(99,\) that does not belong there"),
        (break_parent, r"a child under \(1,\) that does not belong there"),
        (break_length, r"begins with \(1,\) has 3 tokens and 1 slots"),
        (break_locks, "is locked 1 times, by requests 0 times"),
        (break_size, "counts 4 evictable and 0 protected slots, it has 3 and 0"),
        (break_slots, "a slot is in the prefix cache twice"),
        (break_time, "its child at"),
    ],
)
def test_check_names_what_does_not_add_up(fault, complaint: str) -> None:  # type: ignore[no-untyped-def]
    cache = cache_of()
    put(cache, [1, 2, 3])
    cache.check()
    fault(cache, cache.match_prefix([1, 2, 3]).node)
    with pytest.raises(IntegrityError, match=complaint):
        cache.check()


# --- what an EAGLE draft needs ------------------------------------------------------------------------------------


def test_pair_keys_leave_the_last_token_to_compute() -> None:
    """Its pair is not known yet; and its logits and hidden state are what the first round starts from."""
    cache = cache_of(reads_ahead=1)
    slots = put(cache, [1, 2, 3, 4])
    assert cache.cacheable_len(4) == 3
    assert found(cache, [1, 2, 3, 4]) == slots[:3]
    assert found(cache, [1, 2, 3]) == slots[:2]
    assert found(cache, [1]) == []
    assert found(cache, []) == []


def test_pair_keys_tell_the_same_token_before_another_one_apart() -> None:
    cache = cache_of(reads_ahead=1)
    first = put(cache, [1, 2, 3])
    assert found(cache, [1, 2, 4]) == first[:1]
    second = put(cache, [1, 2, 4])
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert found(cache, [1, 2, 4, 5]) == second[:2]
    assert found(cache, [1, 2, 3, 5]) == first[:2]


def test_pair_keys_in_pages() -> None:
    """A page of 4 needs 5 tokens: the fifth is the last pair's second."""
    cache = cache_of(page_size=4, reads_ahead=1)
    slots = put(cache, [1, 2, 3, 4, 5])
    assert found(cache, [1, 2, 3, 4]) == []
    assert found(cache, [1, 2, 3, 4, 6]) == []
    assert found(cache, [1, 2, 3, 4, 5]) == slots[:4]


def test_three_layers_need_three_tokens_ahead() -> None:
    """Row p of layer i depends on the tokens up to p + 1 + i: only where all of them agree is it found."""
    cache = cache_of(reads_ahead=3)
    first = put(cache, [1, 2, 3, 4, 5, 6])
    assert cache.cacheable_len(6) == 3
    assert found(cache, [1, 2, 3, 4, 5, 6, 7]) == first[:3]
    assert found(cache, [1, 2, 3, 4, 9, 9, 9]) == first[:1]
    second = put(cache, [1, 2, 3, 4, 9, 9, 9])
    assert (second[0], second[1] != first[1]) == (first[0], True)
    assert found(cache, [1, 2, 3, 4, 9, 9]) == second[:3]
    assert found(cache, [1, 2, 3]) == []


class Rows:
    """What each slot's two rows saw: the target's, the text to its token; the draft's, one token more."""

    def __init__(self, reads_ahead: int) -> None:
        self.cache = cache_of(size=512, reads_ahead=reads_ahead)
        self.target: dict[int, list[int]] = {}
        self.draft: dict[int, list[int]] = {}

    def serve(self, ids: list[int]) -> None:
        """As `put`. With plain keys the last matched token counts as not matched, so that its row is made anew."""
        hit = found(self.cache, ids)
        if not self.cache.reads_ahead:
            hit = hit[:-1]
        for position, slot in enumerate(hit):
            assert self.target[slot] == ids[: position + 1]
            assert self.draft[slot] == ids[: position + 2], "the draft's row was fed another token"
        slots = hit + self.cache.allocator.alloc(len(ids) - len(hit)).tolist()
        for position in range(len(hit), len(ids)):
            self.target[slots[position]] = ids[: position + 1]
            self.draft[slots[position]] = ids[: position + 2]
        # The last token's next one is not known: its draft row is not written, and it is not cached.
        cached = ids if self.cache.reads_ahead else ids[:-1]
        had, n = self.cache.insert(cached, torch.tensor(slots)), self.cache.cacheable_len(len(cached))
        self.cache.allocator.free(torch.tensor(slots[len(hit) : had] + slots[n:], dtype=torch.int64))
        self.cache.check()


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), max_size=12))
def test_MEM_14_with_pair_keys_every_row_that_is_found_was_written_for_this_text(prompts: list[list[int]]) -> None:
    """Of the target and of the draft. A slot that no one wrote is in neither dictionary."""
    rows = Rows(reads_ahead=1)
    for prompt in prompts:
        rows.serve(prompt)


def test_plain_keys_give_a_draft_the_wrong_row_even_if_the_last_token_is_computed_anew() -> None:
    """The module's example: a b c, a b d, and then a b d e finds the row of b that was fed c."""
    rows = Rows(reads_ahead=0)
    rows.serve([1, 2, 3, 0])
    rows.serve([1, 2, 4, 0])
    with pytest.raises(AssertionError, match="fed another token"):
        rows.serve([1, 2, 4, 5, 0])
