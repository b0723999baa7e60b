"""Who owns which KV slot.

A slot is a row number of the KV buffers, good for the keys and values of one token in every layer of the target
and of the draft. Slots are owned in pages: page p is the slots p·page_size to (p+1)·page_size - 1, and a page of one
slot is that slot. Page 0 is a dummy: padded rows write to slot 0, and none of its slots is ever handed out. The free
list lives on the device of the models, so that taking slots needs no trip to the host.

Nothing here knows which slots of a page hold a token. A page is free again as soon as one of its slots is freed, so
who frees must leave out every slot that shares a page with a token that stays: see `align_evict_mask_to_page_size`.

Source: SGLang: python/sglang/srt/mem_cache/memory_pool.py:TokenToKVPoolAllocator and
python/sglang/srt/mem_cache/paged_allocator.py:PagedTokenToKVPoolAllocator @v0.4.6; `backup_state` and
`restore_state` came with b26bc86b36 (#4908) and left with the v1 worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refspec.kernels.checks import values_are_checked
from refspec.memory.to_device import to_device


class OutOfSlots(RuntimeError):
    """More slots were asked for than are free."""


class IntegrityError(AssertionError):
    """The bookkeeping of slots does not add up: a fault of the engine, not of its user."""


@dataclass(frozen=True)
class AllocatorState:
    """A snapshot: which part of which queue the free pages were. It can be restored any number of times."""

    queue: Tensor
    first: int
    end: int

    @property
    def free_pages(self) -> Tensor:
        return self.queue[self.first : self.end]


class SlotAllocator:
    """`size` slots behind the dummy page, first in, first out.

    available(), alloc(), taken and returned count slots, always those of whole pages.

    What a call costs depends on how many slots it is about, not on how large the pool is: every round takes snapshots.
    So the free pages are a part of a longer queue: pages are taken from its front, freed ones are added at its end, and
    nothing that was written is overwritten. Then two numbers are a snapshot. A full queue is left for a new one, which
    copies the free pages: once for as many freed pages as the pool has, at most.
    """

    def __init__(self, size: int, device: torch.device, page_size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"the KV pool needs at least 1 slot, got {size}")
        if page_size < 1 or size % page_size:
            raise ValueError(f"a KV pool of {size} slots cannot be cut into pages of {page_size}")
        self.size, self.page_size = size, page_size
        pages = size // page_size
        self._queue = torch.zeros(2 * pages, dtype=torch.int64, device=device)
        self._queue[:pages] = torch.arange(1, pages + 1, device=device)
        self._first, self._end = 0, pages
        self._written = pages  # entries from here on have never been a part of a snapshot
        self.owned = torch.zeros(pages + 1, dtype=torch.bool, device=device)  # by page
        self.taken = self.returned = 0  # slots, over the allocator's life

    @property
    def free_pages(self) -> Tensor:
        """i64: in the order in which they will be given out."""
        return self._queue[self._first : self._end]

    @property
    def free_slots(self) -> Tensor:
        """i64 (available()): the slots of the free pages, in their order."""
        return self._slots_of(self.free_pages)

    def available(self) -> int:
        return (self._end - self._first) * self.page_size

    def alloc(self, count: int) -> Tensor:
        """Take `count` slots, page by page: i64 (count).

        Raises OutOfSlots, and takes none, when fewer are free, and ValueError for a count that is no whole pages.
        """
        if count % self.page_size:
            raise ValueError(f"{count} slots are not whole pages of {self.page_size}")
        return self._slots_of(self._take(count // self.page_size))

    def slots_to_extend(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """How many slots `alloc_extend` takes from the free ones: those of new pages, not those of begun ones."""
        return sum(self._new_pages(prefix_lens, seq_lens)) * self.page_size

    def alloc_extend(self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_slots: Tensor) -> Tensor:
        """Slots for the positions prefix_lens[r] to seq_lens[r] - 1 of each request r.

        last_slots i64 (b): the slot of each request's last token, at position prefix_lens[r] - 1. Where a page is not
        full with it, the new tokens first fill that page, then whole new ones; else any number may stand there.
        Returns i64 (sum of seq_lens - prefix_lens), request by request, each by position. The token at position p has
        slot p % page_size of its page, provided that this was so for the last token.

        Raises OutOfSlots, and takes none, when the new pages are not free; ValueError for lengths that shrink or are
        negative; where values are checked, IntegrityError for a last slot that stands elsewhere in its page than its
        position does, or that nobody owns.
        """
        if self.page_size == 1:
            return self.alloc(self.slots_to_extend(prefix_lens, seq_lens))
        size, device, b = self.page_size, self.free_pages.device, len(prefix_lens)
        new_pages = self._new_pages(prefix_lens, seq_lens)
        count = sum(seq_lens) - sum(prefix_lens)
        numbers = [list(prefix_lens), list(seq_lens), new_pages]
        prefix, end, new = to_device(numbers, torch.int64, device).unbind()
        lens = end - prefix
        if values_are_checked(device):
            self._check_last_slots(prefix, last_slots)

        # The b pages that the last tokens lie in, then the new ones, request by request.
        pages = torch.cat([last_slots // size, self._take(sum(new_pages))])
        first_new = b + new.cumsum(0) - new
        request = torch.repeat_interleave(torch.arange(b, device=device), lens, output_size=count)
        position = torch.arange(count, device=device) + (prefix - lens.cumsum(0) + lens)[request]
        nth_new = position // size - ((prefix + size - 1) // size)[request]  # -1: the page of the last token
        page = pages[torch.where(nth_new < 0, request, first_new[request] + nth_new)]
        return page * size + position % size

    def free(self, slots: Tensor) -> None:
        """Give back the pages that slots (n) lie in, each once, however many of its slots are there.

        Single slots become free in the order given, pages in the order of their numbers. Where values are checked,
        raises IntegrityError, and frees none, if one is not owned or a slot comes twice.
        """
        if values_are_checked(slots.device):
            self._check_owned(slots)
        pages = slots if self.page_size == 1 else torch.unique(slots // self.page_size)
        self.owned[pages] = False
        self._put(pages)
        self.returned += len(pages) * self.page_size

    def backup_state(self) -> AllocatorState:
        return AllocatorState(self._queue, self._first, self._end)

    def restore_state(self, state: AllocatorState) -> None:
        """Back to what `backup_state` saw: the same slots free, in the same order."""
        self.returned += (state.end - state.first) * self.page_size - self.available()
        if state.queue is self._queue and state.first <= self._first and state.end <= self._end:
            self.owned[self._queue[state.end : self._end]] = True  # freed since then
            self.owned[self._queue[state.first : min(self._first, state.end)]] = False  # taken since then
        else:
            self.owned[1:] = True
            self.owned[state.free_pages] = False
            self._written = len(state.queue)  # what else has been written there is not known here
        self._queue, self._first, self._end = state.queue, state.first, state.end

    def check(self, owners: Iterable[tuple[str, Tensor]]) -> None:
        """Every page is free or owned by one of `owners` (name, slots); no slot comes twice; page 0 is nobody's.

        An owner of a page may name any of its slots, but at least one. Raises IntegrityError that names the slots and
        their owners.
        """
        holders = [("the free list", self.free_slots), *owners]
        if not self._adds_up([slots.cpu() for _, slots in holders]):
            raise self._fault(holders)
        if bool(self.owned[self.free_pages].any()):
            raise IntegrityError(f"slots are free and count as owned, among {self.free_slots.tolist()}")

    def _adds_up(self, holdings: list[Tensor]) -> bool:
        """Every page but the first is held once, and no slot comes twice. The engine's tests ask after every step."""
        slots, pages = torch.cat(holdings), self.size // self.page_size
        if len(slots) and (slots.min() < 0 or slots.max() // self.page_size > pages or slots.bincount().max() > 1):
            return False
        if self.page_size > 1:
            slots = torch.cat([(each // self.page_size).unique() for each in holdings])
        return slots.bincount(minlength=pages + 1).tolist() == [0] + [1] * pages

    def _fault(self, holders: list[tuple[str, Tensor]]) -> IntegrityError:
        """What does not add up, the first in the order of the holders."""
        pages = self.size // self.page_size
        holder: dict[int, str] = {0: "the dummy slot"}
        for name, slots in holders:
            numbers = slots.tolist()
            held = {number // self.page_size for number in numbers}
            for slot in numbers:
                if not 0 <= slot // self.page_size <= pages:
                    first, last = self.page_size, self.page_size + self.size - 1
                    return IntegrityError(f"{name} holds {slot}, which is no slot of this pool ({first} to {last})")
                if slot // self.page_size in holder:
                    what = f"slot {slot}" if self.page_size == 1 else f"the page of slot {slot}"
                    return IntegrityError(f"{what} is held by {holder[slot // self.page_size]} and by {name}")
            if len(set(numbers)) != len(numbers):
                twice = next(slot for slot in numbers if numbers.count(slot) > 1)
                return IntegrityError(f"slot {twice} is held by {name} and by {name}")
            holder.update(dict.fromkeys(held, name))
        lost = [page for page in range(1, pages + 1) if page not in holder]
        first_lost = self._slots_of(torch.tensor(lost)).tolist()
        return IntegrityError(f"{len(first_lost)} of {self.size} slots are held by nobody, the first: {first_lost[:8]}")

    def _take(self, pages: int) -> Tensor:
        if pages > self._end - self._first:
            raise OutOfSlots(
                f"{pages * self.page_size} KV slots are needed, {self.available()} of {self.size} are free"
            )
        taken = self.free_pages[:pages]
        self._first += pages
        self.owned[taken] = True
        self.taken += pages * self.page_size
        return taken

    def _put(self, pages: Tensor) -> None:
        """Add pages at the end of the queue; in a new one if it is full, or if a restore has left entries there."""
        if self._end < self._written or self._end + len(pages) > len(self._queue):
            free = self.free_pages
            self._queue = torch.cat([free, free.new_zeros(2 * (len(self.owned) - 1) - len(free))])
            self._first, self._end = 0, len(free)
        self._queue[self._end : self._end + len(pages)] = pages
        self._end += len(pages)
        self._written = self._end

    def _slots_of(self, pages: Tensor) -> Tensor:
        if self.page_size == 1:
            return pages
        return (pages.unsqueeze(1) * self.page_size + torch.arange(self.page_size, device=pages.device)).flatten()

    def _new_pages(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> list[int]:
        if not all(0 <= old <= new for old, new in zip(prefix_lens, seq_lens, strict=True)):
            raise ValueError(f"requests of lengths {list(prefix_lens)} cannot be extended to {list(seq_lens)}")
        return [
            -(-new // self.page_size) + -old // self.page_size for old, new in zip(prefix_lens, seq_lens, strict=True)
        ]

    def _check_owned(self, slots: Tensor) -> None:
        first, last = self.page_size, self.page_size + self.size - 1
        if len(slots) and not (int(slots.min()) >= first and int(slots.max()) <= last):
            raise IntegrityError(
                f"numbers that are no slots of this pool ({first} to {last}) are among {slots.tolist()}"
            )
        if len(torch.unique(slots)) != len(slots) or not bool(self.owned[slots // self.page_size].all()):
            raise IntegrityError(f"slots freed twice or never given out, among {slots.tolist()}")

    def _check_last_slots(self, prefix: Tensor, last_slots: Tensor) -> None:
        begun = prefix % self.page_size != 0
        last, position = last_slots[begun], prefix[begun] - 1
        in_pool = (last >= self.page_size) & (last < self.page_size + self.size)
        owned = self.owned[torch.where(in_pool, last // self.page_size, 0)]
        if not bool((owned & (last % self.page_size == position % self.page_size)).all()):
            raise IntegrityError(f"slots {last.tolist()} do not hold the tokens at positions {position.tolist()}")
