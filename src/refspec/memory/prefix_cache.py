"""Which prefixes are still in the KV cache, so that a request that begins like an earlier one need not compute them.

A radix tree over token ids. An edge is a run of tokens, its node holds their slots, and two prefixes share the nodes
of what they have in common; where they part, a node is split. Keys are whole pages: a page belongs to the tree or to
one request, never to both. Nodes that running requests read are locked, along their path; of the others the least
recently used leaves are evicted when slots are needed.

**What an EAGLE draft needs.** The slots are the draft's too, and the draft's row at a token is fed the token *after* it
(see `spec/extend.py`). So the same prefix does not mean the same rows. After "a b c" is cached, a request "a b d"
finds the target's rows of a and b as it needs them, and the draft's row at b wrong: that one was fed c. To compute at
least the last shared token anew is no cure. Once "a b d" is in the tree as well, below the old row of b, a third
request "a b d e" matches all of it, with the wrong row in the middle. Verification repairs what the draft gets wrong,
so no output shows this, only fewer accepted tokens. With `reads_ahead` = 1 a token counts as the same only together
with the token after it: the key of n tokens is n - 1 pairs, every matched slot has both models' rows right, and at
least the last token of a prompt is left to compute. The draft's rows of what is left need nothing else of the prefix:
each is fed the target's hidden state at its own slot's token. A draft of S layers, each fed one token further ahead,
needs S tokens after each one in the key: then a match means that the rows of all layers are right. Plain keys, with
`reads_ahead` = 0, are for what is fed its own token: a target alone, or a standalone draft. They can match a whole
prompt; so whoever needs logits looks up all but its last token.

**What the scheduler owes the tree.**

1. Lock the node of a match before anything is evicted, and unlock it when the request ends, after its insert.
2. Evict before `SlotAllocator.backup_state`, insert after `restore_state`. A restore in between would take back a slot
   for its old owner.
3. Insert only tokens whose rows *all* models have written. The draft's rows of a round are written by its extend, and
   that is skipped for requests that have finished: the last block of a finished request has none, nor has a prompt
   whose first output token was its last. A tail cut off like this is freed, not cached.
4. `insert(ids, slots)` says how many leading slots the tree has already, `had`. Where the request's own match was m
   long, and n = cacheable_len(len(ids)):

       slots[:m]            slots[m:had]              slots[had:n]             slots[n:]
       shared since the     copies of what others     the tree's               the request's,
       match                inserted meanwhile        from now on              as before

   The request frees the copies. If it goes on, it locks the node of a new match and puts that match's slots into its
   table.

Source: SGLang (RadixAttention, Zheng et al. 2024, section 3): python/sglang/srt/mem_cache/radix_cache.py:RadixCache
@0.5.23, where pairs are the bigram view of a RadixKey, switched on by is_eagle. Drafts of several layers get them too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from refspec.memory.allocator import IntegrityError, SlotAllocator

# What one slot stands for in a key: a token, or a token and those after it that its rows depend on.
Unit = int | tuple[int, ...]


@dataclass(eq=False)
class TreeNode:
    """A run of tokens behind those of its parent. Its object stays the end of that run when the run is split."""

    key: list[Unit]  # whole pages; empty in the root alone
    slots: Tensor  # i64, one for each unit
    parent: TreeNode | None  # None in the root, and in a node that was evicted
    last_used: int  # the cache's clock when a match or insert last came through
    lock_ref: int = 0  # requests that hold this node or one below it
    children: dict[tuple[Unit, ...], TreeNode] = field(default_factory=dict)  # by the first page of their keys


class PrefixMatch(NamedTuple):
    """The longest cached prefix."""

    slots: Tensor  # i64 (matched tokens), whole pages
    node: TreeNode  # where it ends; the root if nothing matched


class PrefixCache:
    """The tree. See the module's docstring.

    reads_ahead: how many tokens after its own a row depends on.
    evictable_size: slots of nodes without lock, all of which evict could free. protected_size: slots of the others.
    """

    def __init__(self, allocator: SlotAllocator, reads_ahead: int = 0) -> None:
        self.allocator, self.page_size, self.reads_ahead = allocator, allocator.page_size, reads_ahead
        self.root = TreeNode([], allocator.free_pages[:0].clone(), None, last_used=0)
        self.clock = 0  # one tick for each match and each insert
        self.evictable_size = self.protected_size = 0

    # --- use ----------------------------------------------------------------------------------------------------

    def cacheable_len(self, num_tokens: int) -> int:
        """How many leading slots of a sequence of so many tokens the tree can hold or match: whole pages of units."""
        units = max(num_tokens - self.reads_ahead, 0)
        return units // self.page_size * self.page_size

    def match_prefix(self, token_ids: Sequence[int]) -> PrefixMatch:
        """Look token_ids up. Afterwards a node ends where the match does. Lock it before anything else happens."""
        node, _ = self._walk(self._units(token_ids))
        return PrefixMatch(self.slots_above(node), node)

    def slots_above(self, node: TreeNode) -> Tensor:
        """The slots of the prefix that ends with a node, i64. Raises IntegrityError if the node was evicted."""
        parts = [above.slots for above in reversed(self._path(node))]
        return torch.cat([self.root.slots, *parts])

    def insert(self, token_ids: Sequence[int], slots: Tensor) -> int:
        """Take over the slots (at least cacheable_len) of a prefix, but for those leading ones that are there already.

        Returns how many leading slots the tree had: slots[:had] are still whose they were, see the module's docstring.
        Raises ValueError for fewer slots.
        """
        units = self._units(token_ids)
        if len(slots) < len(units):
            raise ValueError(f"{len(slots)} slots for a key of {len(units)} tokens")
        node, had = self._walk(units)
        if had < len(units):
            leaf = TreeNode(units[had:], slots[had : len(units)].clone(), node, self.clock)
            node.children[self._first_page(leaf.key)] = leaf
            self.evictable_size += len(leaf.key)
        return had

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Protect a node and all above it from eviction, once more. Raises IntegrityError if it was evicted."""
        for above in self._path(node):
            if above.lock_ref == 0:
                self.evictable_size -= len(above.key)
                self.protected_size += len(above.key)
            above.lock_ref += 1

    def dec_lock_ref(self, node: TreeNode) -> None:
        """Take back one `inc_lock_ref`. Raises IntegrityError if there is none to take back."""
        path = self._path(node)
        if any(above.lock_ref < 1 for above in path):
            raise IntegrityError("a node of the prefix cache was unlocked more often than locked")
        for above in path:
            above.lock_ref -= 1
            if above.lock_ref == 0:
                self.evictable_size += len(above.key)
                self.protected_size -= len(above.key)

    def evict(self, num_slots: int) -> int:
        """Free leaves, the least recently used first, until num_slots are freed or every node left is needed.

        A node whose last child went is a leaf too. Nodes go whole, so more may be freed. Returns how many were.
        """
        order = count()  # leaves never tie in last_used; this spares the heap from comparing nodes if they did
        heap = [(node.last_used, next(order), node) for node in self._nodes() if self._is_evictable(node)]
        heapq.heapify(heap)
        freed = 0
        while freed < num_slots and heap:
            leaf = heapq.heappop(heap)[2]
            parent = leaf.parent
            assert parent is not None
            self.allocator.free(leaf.slots)
            del parent.children[self._first_page(leaf.key)]
            leaf.parent = None
            self.evictable_size -= len(leaf.key)
            freed += len(leaf.key)
            if self._is_evictable(parent):
                heapq.heappush(heap, (parent.last_used, next(order), parent))
        return freed

    def held_slots(self) -> Tensor:
        """i64: all slots of the tree, an owner for `SlotAllocator.check`."""
        return torch.cat([self.root.slots, *(node.slots for node in self._nodes())])

    def check(self, locked: Iterable[TreeNode] = ()) -> None:
        """Is the tree sound? locked: the node that each running request holds, once for each lock.

        With the allocator's check (the tree as one owner) it follows that free slots, those of requests and those held
        here add up to the pool. Raises IntegrityError.
        """
        locks: dict[TreeNode, int] = {}
        for node in locked:
            for above in self._path(node):
                locks[above] = locks.get(above, 0) + 1
        nodes = [self.root, *self._nodes()]
        for node in nodes:
            self._check_node(node, locks.get(node, 0))
        slots, size = self.held_slots().tolist(), self.page_size
        if len(set(slots)) != len(slots):
            raise IntegrityError(f"a slot is in the prefix cache twice, among {slots}")
        if any(slot != slots[i // size * size] // size * size + i % size for i, slot in enumerate(slots)):
            raise IntegrityError(f"the slots of the prefix cache are not whole pages of {size}: {slots}")
        protected = sum(len(node.key) for node in nodes if node.lock_ref)
        if (self.evictable_size, self.protected_size) != (len(slots) - protected, protected):
            raise IntegrityError(
                f"the prefix cache counts {self.evictable_size} evictable and {self.protected_size} protected slots, "
                f"it has {len(slots) - protected} and {protected}"
            )

    # --- the tree -----------------------------------------------------------------------------------------------

    def _units(self, token_ids: Sequence[int]) -> list[Unit]:
        """What the tokens are as a key: whole pages of it."""
        units: list[Unit] = [*token_ids]
        if self.reads_ahead:
            units = [*zip(*(token_ids[i:] for i in range(self.reads_ahead + 1)), strict=False)]
        return units[: self.cacheable_len(len(token_ids))]

    def _first_page(self, key: Sequence[Unit]) -> tuple[Unit, ...]:
        return tuple(key[: self.page_size])

    def _walk(self, units: list[Unit]) -> tuple[TreeNode, int]:
        """Follow units as far as they lead, and mark the way as used: the node where they end, and how many they were.

        Where they end within a node, it is split, so that they end at one.
        """
        self.clock += 1
        node, done = self.root, 0
        while child := node.children.get(self._first_page(units[done : done + self.page_size])):
            same = self._common_len(child.key, units[done : done + len(child.key)])
            node = child if same == len(child.key) else self._split(child, same)
            node.last_used = self.clock
            done += same
        return node, done

    def _common_len(self, key: list[Unit], other: list[Unit]) -> int:
        """Units in whole pages that two keys of whole pages have in common."""
        size = self.page_size
        for start in range(0, len(other), size):
            if key[start : start + size] != other[start : start + size]:
                return start
        return len(other)

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        """Put a new node between `node` and its parent, which takes over the first `length` units. Returns it.

        `node` itself stays the lower one: whoever holds it keeps all that it held.
        """
        assert node.parent is not None
        upper = TreeNode(node.key[:length], node.slots[:length].clone(), node.parent, node.last_used, node.lock_ref)
        node.parent.children[self._first_page(upper.key)] = upper
        node.parent, node.key, node.slots = upper, node.key[length:], node.slots[length:].clone()
        upper.children[self._first_page(node.key)] = node
        return upper

    def _path(self, node: TreeNode) -> list[TreeNode]:
        """From a node up to the root, which is left out."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        if node is not self.root:
            raise IntegrityError("a node is no longer in the prefix cache: it was evicted before it was locked")
        return path

    def _nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents before children."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def _is_evictable(self, node: TreeNode) -> bool:
        return not node.children and node.lock_ref == 0 and node is not self.root

    def _check_node(self, node: TreeNode, locks: int) -> None:
        where = f"the node of the prefix cache that begins with {self._first_page(node.key)}"
        if len(node.key) != len(node.slots) or len(node.key) % self.page_size or (node is self.root) == bool(node.key):
            raise IntegrityError(f"{where} has {len(node.key)} tokens and {len(node.slots)} slots")
        if node.lock_ref != locks:
            raise IntegrityError(f"{where} is locked {node.lock_ref} times, by requests {locks} times")
        for first_page, child in node.children.items():
            if child.parent is not node or self._first_page(child.key) != first_page:
                raise IntegrityError(f"{where} has a child under {first_page} that does not belong there")
            if child.last_used > (self.clock if node is self.root else node.last_used):
                raise IntegrityError(f"{where} was used at {node.last_used}, its child at {child.last_used}")
