"""A scheduler as far as memory sees it, driven at random beside plain dictionaries that know what should happen.

`MemoryModel` has requests that arrive with shared prefixes, are prefilled in chunks, decode in rounds that reserve and
roll back draft slots, verify and commit, finish, are aborted or retracted; it evicts under pressure. The allocator and
the prefix cache are the real ones. The oracle is three dictionaries: what the target and the draft wrote into each
slot (a hash of all that the row saw), and which slots the cache holds for each prefix, page by page.

Run as a script, it takes as many steps as asked:  python tests/memory_model.py 1000000 [SEED]
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from refspec.kernels import align_evict_mask_to_page_size
from refspec.memory.allocator import SlotAllocator
from refspec.memory.prefix_cache import PrefixCache, TreeNode

CPU = torch.device("cpu")
CONTEXT = 40  # tokens that a request may come to


def i64(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def contexts(ids: Sequence[int]) -> list[int]:
    """For each token, a hash of it and all before it; one entry more, of nothing, in front."""
    seen = [0]
    for token in ids:
        seen.append(hash((seen[-1], token)))
    return seen


@dataclass(eq=False)
class ModelRequest:
    """ids: prompt and output. While it runs: slots of its first positions, allocated ones that hold nothing yet
    included; kv_len of them committed; draft_len of those with the draft's row written, too; matched of them the
    prefix cache's, which it holds by `node`."""

    ids: list[int]
    prompt_len: int
    slots: list[int] = field(default_factory=list)
    kv_len: int = 0
    draft_len: int = 0
    matched: int = 0
    node: TreeNode | None = None

    @property
    def prefilled(self) -> bool:
        return self.kv_len >= self.prompt_len


@dataclass(frozen=True)
class Shape:
    """What one run of the model is about."""

    page_size: int = 1
    pages: int = 24
    with_draft: bool = True  # pair keys, and the draft's rows are looked at
    topk: int = 1
    num_steps: int = 3
    num_draft_tokens: int = 4


SHAPES = [
    Shape(page_size=4, pages=12),
    Shape(page_size=4, pages=20, topk=2, num_draft_tokens=6),
    Shape(page_size=3, pages=9, with_draft=False),
    Shape(page_size=16, pages=5, topk=3, num_draft_tokens=10),
    Shape(),
    Shape(pages=14, topk=4, num_draft_tokens=9),
    Shape(pages=40, with_draft=False, num_steps=1),
]


class MemoryModel:
    """Every method but those with an underscore is a step; they take whatever numbers and make sense of them."""

    STEPS = ("arrive", "admit", "prefill", "decode", "publish", "finish", "abort", "retract", "evict", "empty")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.allocator = SlotAllocator(shape.page_size * shape.pages, CPU, shape.page_size)
        self.cache = PrefixCache(self.allocator, reads_ahead=int(shape.with_draft))
        self.waiting: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        # The oracle. Slots that nobody wrote since they were handed out are in neither of the first two.
        self.target: dict[int, int] = {}
        self.draft: dict[int, int] = {}
        self.cached: dict[tuple[object, ...], list[int]] = {}  # a prefix of whole pages -> the last page's slots
        self.used: dict[tuple[object, ...], int] = {}  # when it was last matched or inserted
        self.clock = 0
        self.seen: Counter[str] = Counter()  # what happened how often, so that tests can tell that it did

    # --- steps --------------------------------------------------------------------------------------------------

    def arrive(self, a: int, b: int, c: int) -> None:
        """A prompt: the begin of one of three texts, perhaps with an end of its own."""
        if len(self.waiting) + len(self.running) >= 6:
            return
        text = contexts([a % 3] * CONTEXT)[1:]
        prompt = [h % 3 for h in text[: 1 + b % 24]] + ([c % 2] * (c % 5))
        self.waiting.append(ModelRequest(prompt, len(prompt)))

    def admit(self, a: int, b: int, c: int) -> None:
        """The request that has waited longest gets what is cached of it, and its first chunk is read."""
        if not self.waiting or len(self.running) >= 4:
            return
        request = self.waiting.pop(0)
        # As many as can be found without the last token, whose logits are needed. Pair keys never find that one.
        known = request.ids if self.shape.with_draft else request.ids[:-1]
        request.slots, request.node = self._match(known)
        request.matched = request.kv_len = request.draft_len = len(request.slots)
        self.cache.inc_lock_ref(request.node)
        self.running.append(request)
        self.seen["prefix hit"] += bool(request.slots)
        self._prefill(request, a)

    def prefill(self, a: int, b: int, c: int) -> None:
        """One more chunk of a prompt that is not read yet."""
        request = self._choose([r for r in self.running if not r.prefilled], a)
        if request:
            self._prefill(request, b)

    def decode(self, a: int, b: int, c: int) -> None:
        """A round: draft slots are taken and rolled back, N nodes verified, some committed. Now and then, a stop."""
        request = self._choose([r for r in self.running if r.prefilled], a)
        if not request:
            return
        shape, room = self.shape, CONTEXT - len(request.ids)
        if room <= 0:
            self._end(request, insert=True)
            return
        if not self._draft(request) or not self._allocate(request, request.kv_len + shape.num_draft_tokens):
            return
        nodes = request.slots[request.kv_len : request.kv_len + shape.num_draft_tokens]
        accepted = 1 + b % min(shape.num_steps + 1, shape.num_draft_tokens, room)
        # On single slots, the accepted path lies anywhere among the nodes; on pages it is compacted to the front.
        rows = list(range(accepted))
        if shape.page_size == 1:
            rows = [0, *sorted(random.Random(c).sample(range(1, len(nodes)), accepted - 1))]
        kept = [nodes[row] for row in rows]
        other = [slot for slot in nodes if slot not in kept]
        first = request.kv_len
        request.ids += self._continuation(request.ids, accepted)
        request.slots[first : first + len(nodes)] = kept + other
        self._write(request, self.target, first, first + accepted, ahead=0)
        request.kv_len += accepted
        if c % 3:  # what was rejected goes back, or is kept for the next round
            self._free_rejected(request, len(other))
        if c % 11 == 0:
            self.seen["stop in a round"] += 1
            self._end(request, insert=True)
        else:
            self._write(request, self.draft, first, first + accepted, ahead=1)
            request.draft_len = request.kv_len

    def publish(self, a: int, b: int, c: int) -> None:
        """Let others find what a running request has, and go on with what they find."""
        request = self._choose(self.running, a)
        if not request:
            return
        assert request.node is not None
        ids, slots = self._to_insert(request)
        had, held = self._insert(ids, slots), self.cache.cacheable_len(len(ids))
        self._free(request.slots[request.matched : had])
        self.seen["duplicates"] += had > request.matched
        found, node = self._match(ids)
        self.cache.inc_lock_ref(node)
        self.cache.dec_lock_ref(request.node)
        assert len(found) == held
        request.node, request.matched, request.slots[:held] = node, held, found

    def finish(self, a: int, b: int, c: int) -> None:
        request = self._choose([r for r in self.running if r.prefilled], a)
        if request:
            self._end(request, insert=True)

    def abort(self, a: int, b: int, c: int) -> None:
        request = self._choose(self.running + self.waiting, a)
        if request in self.waiting:
            self.waiting.remove(request)
        elif request:
            self._end(request, insert=False)

    def retract(self, a: int, b: int, c: int) -> None:
        request = self._choose(self.running, a)
        if request:
            self._retract(request, insert=bool(b % 2))

    def evict(self, a: int, b: int, c: int) -> None:
        self._evict(a % (self.allocator.size // 2) + 1)

    def empty(self, a: int, b: int, c: int) -> None:
        """Once in a while, and when nobody runs, the cache is emptied."""
        if not self.running and a % 4 == 0:
            self.cache.evict(self.cache.evictable_size)
            self.cached.clear()
            self.used.clear()
            assert self.allocator.available() == self.allocator.size
            self.seen["empty"] += 1

    # --- what steps are made of ---------------------------------------------------------------------------------

    def _choose(self, requests: list[ModelRequest], number: int) -> ModelRequest | None:
        return requests[number % len(requests)] if requests else None

    def _continuation(self, ids: list[int], length: int) -> list[int]:
        """The same text is always continued in the same way, so that requests come to the same outputs."""
        more: list[int] = []
        for _ in range(length):
            more.append(contexts(ids + more)[-1] % 3)
        return more

    def _prefill(self, request: ModelRequest, chunk: int) -> None:
        first, until = request.kv_len, min(request.kv_len + 1 + chunk % 12, request.prompt_len)
        if not self._allocate(request, until):
            return
        self._write(request, self.target, first, until, ahead=0)
        request.kv_len = until
        if request.prefilled and len(request.ids) == request.prompt_len:
            request.ids += self._continuation(request.ids, 1)
            if chunk % 7 == 0:  # its first token was its last: no draft forward for it
                self.seen["stop at prefill"] += 1
                self._end(request, insert=True)
                return
        self._write(request, self.draft, first, until, ahead=1)
        request.draft_len = until

    def _draft(self, request: ModelRequest) -> bool:
        """Reserve the region of the draft's branches behind the committed tokens, and give it back."""
        shape, size = self.shape, self.shape.page_size
        held = request.kv_len
        if shape.topk == 1 or size == 1:
            until = held + shape.topk * shape.num_steps
        else:
            until = held // size * size + shape.topk * -(-(held % size + shape.num_steps) // size) * size
        own = request.slots[:held]
        need = self.allocator.slots_to_extend([held], [until])
        if not self._make_room(request, need):
            return False
        state, free = self.allocator.backup_state(), self.allocator.free_slots.tolist()
        slots = self.allocator.alloc_extend([held], [until], i64([own[-1]])).tolist()
        begun = {own[-1] // size} if held % size else set()
        assert len(set(slots)) == until - held
        assert {slot // size for slot in slots} - begun <= {slot // size for slot in free}
        assert all(slot % size == (held + i) % size for i, slot in enumerate(slots))
        for slot in slots:  # what the draft writes there is nonsense to everyone afterwards
            assert slot not in own
        self.allocator.restore_state(state)
        assert self.allocator.free_slots.tolist() == free
        return True

    def _allocate(self, request: ModelRequest, until: int) -> bool:
        """Slots up to position `until`, or the request is gone."""
        held = len(request.slots)
        if until > held:
            if not self._make_room(request, self.allocator.slots_to_extend([held], [until])):
                return False
            last = i64(request.slots[-1:] or [0])
            new = self.allocator.alloc_extend([held], [until], last).tolist()
            for slot in new:
                self.target.pop(slot, None)
                self.draft.pop(slot, None)
            request.slots += new
        return True

    def _make_room(self, request: ModelRequest, need: int) -> bool:
        """Evict, then retract others, the newest first; a request that is alone and has too little room is ended."""
        while (missing := need - self.allocator.available()) > 0:
            self.seen["pressure"] += 1
            if self._evict(missing) >= missing:
                break
            others = [other for other in self.running if other is not request]
            if not others:
                self.seen["too large"] += 1
                self._end(request, insert=False)
                return False
            self._retract(others[-1], insert=False)
        return True

    def _write(self, request: ModelRequest, rows: dict[int, int], first: int, until: int, ahead: int) -> None:
        """The rows of positions first to until - 1; ahead: tokens that they see beyond their own."""
        seen = contexts(request.ids)
        for position in range(first, until):
            rows[request.slots[position]] = seen[position + 1 + ahead]

    def _free_rejected(self, request: ModelRequest, rejected: int) -> None:
        """The rejected nodes, and what else is allocated behind the committed tokens, but for begun pages."""
        tail = len(request.slots) - request.kv_len
        mask = torch.ones(1, tail, dtype=torch.bool)
        align_evict_mask_to_page_size(i64([request.kv_len]), mask, self.shape.page_size, "torch")
        self._free(i64(request.slots[request.kv_len :])[mask[0]].tolist())
        del request.slots[request.kv_len :]
        self.seen["freed less than was rejected"] += int(mask.sum()) < rejected

    def _to_insert(self, request: ModelRequest) -> tuple[list[int], list[int]]:
        """What of a request others may read: tokens with all their rows written, and their slots."""
        if not self.shape.with_draft:
            return request.ids[: request.kv_len], request.slots[: request.kv_len]
        return request.ids[: request.draft_len + 1], request.slots[: request.draft_len]

    def _end(self, request: ModelRequest, insert: bool) -> None:
        """Whatever the request holds goes to the cache or back."""
        assert request.node is not None
        had = held = request.matched
        if insert:
            ids, slots = self._to_insert(request)
            had, held = self._insert(ids, slots), self.cache.cacheable_len(len(ids))
            self.seen["duplicates"] += had > request.matched
        self._free(request.slots[request.matched : had] + request.slots[held:])
        self.cache.dec_lock_ref(request.node)
        self.running.remove(request)

    def _retract(self, request: ModelRequest, insert: bool) -> None:
        """Back to the queue, with its output as part of what is to be read."""
        self.seen["retracted"] += 1
        self._end(request, insert)
        self.waiting.append(ModelRequest(request.ids, len(request.ids)))

    def _free(self, slots: list[int]) -> None:
        self.allocator.free(i64(slots))

    # --- the cache and its oracle -------------------------------------------------------------------------------

    def _prefixes(self, ids: Sequence[int]) -> list[tuple[object, ...]]:
        """The keys of ids, one more page long each."""
        units: list[object] = list(pairwise(ids)) if self.shape.with_draft else list(ids)
        size = self.shape.page_size
        return [tuple(units[:end]) for end in range(size, len(units) + 1, size)]

    def _match(self, ids: Sequence[int]) -> tuple[list[int], TreeNode]:
        self.clock += 1
        expected: list[int] = []
        for prefix in self._prefixes(ids):
            if prefix not in self.cached:
                break
            self.used[prefix] = self.clock
            expected += self.cached[prefix]
        slots, node = self.cache.match_prefix(ids)
        assert slots.tolist() == expected
        return expected, node

    def _insert(self, ids: Sequence[int], slots: list[int]) -> int:
        self.clock += 1
        expected, size = 0, self.shape.page_size
        for i, prefix in enumerate(self._prefixes(ids)):
            expected += size * (prefix in self.cached)
            self.cached.setdefault(prefix, slots[i * size : (i + 1) * size])
            self.used[prefix] = self.clock
        had = self.cache.insert(ids, i64(slots))
        assert had == expected
        return had

    def _locked(self) -> set[tuple[object, ...]]:
        return {prefix for r in self.running for prefix in self._prefixes(r.ids)[: r.matched // self.shape.page_size]}

    def _evict(self, need: int) -> int:
        """Least recently used, never what is locked, never more than was needed but for the rest of a node."""
        size, locked, before = self.shape.page_size, self._locked(), self.allocator.available()
        evictable = {prefix for prefix in self.cached if prefix not in locked}
        freed = self.cache.evict(need)
        held = set(self.cache.held_slots().tolist())
        gone = [prefix for prefix, slots in self.cached.items() if held.isdisjoint(slots)]
        assert freed == len(gone) * size == self.allocator.available() - before
        assert evictable.issuperset(gone)
        assert freed >= min(need, len(evictable) * size)
        newest = max((self.used[prefix] for prefix in gone), default=0)
        assert sum(self.used[prefix] < newest for prefix in gone) * size < max(need, 1)
        for prefix in gone:
            del self.cached[prefix], self.used[prefix]
        inner = {prefix[:-size] for prefix in self.cached}
        for prefix in evictable - inner:
            assert prefix not in self.cached or self.used[prefix] >= newest
        self.seen["evicted"] += bool(gone)
        return freed

    # --- what must hold after each step -------------------------------------------------------------------------

    def check(self) -> None:
        """Slots add up, the cache is what the oracle says, and every row that a request reads is the one it needs."""
        own = [(f"request {i}", i64(r.slots[r.matched :])) for i, r in enumerate(self.running)]
        self.allocator.check([*own, ("the prefix cache", self.cache.held_slots())])
        self.cache.check([request.node for request in self.running if request.node])
        found: dict[tuple[object, ...], list[int]] = {}
        self._collect(self.cache.root, (), found)
        assert found == self.cached
        protected = len(self._locked()) * self.shape.page_size
        assert self.cache.protected_size == protected
        assert self.cache.evictable_size == len(self.cached) * self.shape.page_size - protected
        for request in self.running:
            assert request.draft_len <= request.kv_len <= len(request.slots)
            seen = contexts(request.ids)
            assert [self.target.get(slot) for slot in request.slots[: request.kv_len]] == seen[1 : request.kv_len + 1]
            if self.shape.with_draft:
                rows = [self.draft.get(slot) for slot in request.slots[: request.draft_len]]
                assert rows == seen[2 : request.draft_len + 2]

    def _collect(self, node: TreeNode, above: tuple[object, ...], found: dict[tuple[object, ...], list[int]]) -> None:
        size, slots = self.shape.page_size, node.slots.tolist()
        for end in range(size, len(node.key) + 1, size):
            found[above + tuple(node.key[:end])] = slots[end - size : end]
        for child in node.children.values():
            self._collect(child, above + tuple(node.key), found)


def drive(model: MemoryModel, steps: int, seed: int) -> None:
    """So many steps at random, check() after each."""
    dice = random.Random(seed)
    weights = [6, 6, 6, 20, 4, 2, 1, 1, 1, 1]
    for name in dice.choices(model.STEPS, weights, k=steps):
        getattr(model, name)(dice.getrandbits(16), dice.getrandbits(16), dice.getrandbits(16))
        model.check()


def main(steps: int, seed: int) -> None:
    """Runs of 1000 steps, each with the next shape and the next seed, until there were `steps`."""
    started, done, seen = time.monotonic(), 0, Counter[str]()
    while done < steps:
        shape = SHAPES[done // 1000 % len(SHAPES)]
        model = MemoryModel(shape)
        try:
            drive(model, 1000, seed + done // 1000)
        except BaseException:
            print(f"{shape}, seed {seed + done // 1000}", file=sys.stderr)
            raise
        seen += model.seen
        done += 1000
        if done % 10000 == 0:
            print(f"{done} steps, {time.monotonic() - started:.0f} s, {dict(seen)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
