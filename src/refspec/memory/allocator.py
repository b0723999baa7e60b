"""Who owns which KV slot.

A slot is a row number of the KV buffers, good for the keys and values of one token in every layer of the target
and of the draft. Slot 0 is a dummy that padded rows write to; it is never handed out. The free list lives on the
device of the models, so that taking slots needs no trip to the host.

Source: SGLang: python/sglang/srt/mem_cache/memory_pool.py:TokenToKVPoolAllocator @v0.4.6; `backup_state` and
`restore_state` came with b26bc86b36 (#4908) and left with the v1 worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


class OutOfSlots(RuntimeError):
    """More slots were asked for than are free."""


class IntegrityError(AssertionError):
    """The bookkeeping of slots does not add up: a fault of the engine, not of its user."""


@dataclass(frozen=True)
class AllocatorState:
    """A snapshot. It shares no memory with the live lists and can be restored any number of times."""

    free_slots: Tensor
    owned: Tensor


class SlotAllocator:
    """Slots 1..size, first in, first out."""

    def __init__(self, size: int, device: torch.device) -> None:
        if size < 1:
            raise ValueError(f"the KV pool needs at least 1 slot, got {size}")
        self.size = size
        self.free_slots = torch.arange(1, size + 1, device=device)  # i64, in the order they will be given out
        self.owned = torch.zeros(size + 1, dtype=torch.bool, device=device)
        self.taken = self.returned = 0  # slots, over the allocator's life

    def available(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> Tensor:
        """Take `count` slots: i64 (count). Raises OutOfSlots and takes none when fewer are free."""
        if count > len(self.free_slots):
            raise OutOfSlots(f"{count} KV slots are needed, {len(self.free_slots)} of {self.size} are free")
        slots, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        self.owned[slots] = True
        self.taken += count
        return slots

    def free(self, slots: Tensor) -> None:
        """Give slots (n) back. Raises IntegrityError, and frees none, if one is not owned or comes twice."""
        if len(slots) and not (int(slots.min()) >= 1 and int(slots.max()) <= self.size):
            raise IntegrityError(
                f"numbers that are no slots of this pool (1 to {self.size}) are among {slots.tolist()}"
            )
        owned_before = self.owned.clone()
        self.owned[slots] = False
        if int((owned_before ^ self.owned).sum()) != len(slots):
            self.owned = owned_before
            raise IntegrityError(f"slots freed twice or never given out, among {slots.tolist()}")
        self.free_slots = torch.cat([self.free_slots, slots])
        self.returned += len(slots)

    def backup_state(self) -> AllocatorState:
        return AllocatorState(self.free_slots.clone(), self.owned.clone())

    def restore_state(self, state: AllocatorState) -> None:
        """Back to what `backup_state` saw: the same slots free, in the same order."""
        self.returned += len(state.free_slots) - len(self.free_slots)
        self.free_slots, self.owned = state.free_slots.clone(), state.owned.clone()

    def check(self, owners: Iterable[tuple[str, Tensor]]) -> None:
        """Every slot is free or owned by one of `owners` (name, slots); none twice; slot 0 by nobody.

        Raises IntegrityError that names the slots and their owners.
        """
        holder: dict[int, str] = {0: "the dummy slot"}
        for name, slots in [("the free list", self.free_slots), *owners]:
            for slot in slots.tolist():
                if not 0 <= slot <= self.size:
                    raise IntegrityError(f"{name} holds {slot}, which is no slot of this pool (1 to {self.size})")
                if slot in holder:
                    raise IntegrityError(f"slot {slot} is held by {holder[slot]} and by {name}")
                holder[slot] = name
        lost = sorted(set(range(self.size + 1)) - set(holder))
        if lost:
            raise IntegrityError(f"{len(lost)} of {self.size} slots are held by nobody, the first: {lost[:8]}")
