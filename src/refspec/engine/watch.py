"""What happens in an engine, step by step: who comes, reads, runs, loses slots, ends, and who holds which page.

    watch = Watch(engine)
    engine.add_request("def fib(n):")
    while watch.unfinished:
        for event in watch.step():
            print(event)
        print(watch.snapshot().free_slots)

The engine knows nothing of it: a watch compares what is there after a step with what it saw at its last look. It can
do so since a step is one thing only (see `refspec.engine.scheduler`): whoever is retracted in a step is not admitted in
the same one. Whoever takes several steps between two looks sees their sum: what has cancelled out is not told.

Of the prefix cache three things are told. *Cached* is what it holds at the moment; *read*, the part of that which
requests have in their tables, with no copy of their own; *found*, the tokens that it had for a request when that was
admitted, and which the request therefore need not read (`Stats.cached_tokens` counts these).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from refspec.contracts import ForwardMode
from refspec.engine.engine import Engine
from refspec.requests.request import Request
from refspec.workers.base import Observer

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that happened in a step, or just before it. Steps are counted from 1.

    request, where there is one: its number, counted from 0 in the order in which the watch saw them come.
    """

    step: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the kind of the event among them."""
        return {"event": type(self).__name__.lower(), **asdict(self)}


@dataclass(frozen=True)
class Arrived(Event):
    """A request is in the queue for the first time."""

    request: int
    prompt_tokens: int


@dataclass(frozen=True)
class Admitted(Event):
    """A request that waited has slots. Of what it needs in the KV cache, some was found, and it reads the rest."""

    request: int
    found_tokens: int
    tokens_to_read: int
    again: bool  # it was retracted before: part of what it reads is its own output


@dataclass(frozen=True)
class Waits(Event):
    """There was no room for the request at the head of the queue. Told once, until it is admitted.

    needed_slots: for what it has to read, and for one round of all after that. room: slots that are free, or cached and
    not in use, without the prefix that it would find itself. Both are as they are after the step.
    """

    request: int
    needed_slots: int
    room: int
    behind: int  # others that wait behind it, for nobody overtakes it


@dataclass(frozen=True)
class Read(Event):
    """A request has read a part of its prompt, or all that was left."""

    request: int
    tokens: int
    unread: int
    again: bool  # it was retracted before


@dataclass(frozen=True)
class Committed(Event):
    """A request has so many new output tokens: the first one, from its prompt, or what a round brought."""

    request: int
    tokens: int
    in_round: bool


@dataclass(frozen=True)
class Retracted(Event):
    """A request has lost its slots and waits again, with the output tokens it had."""

    request: int
    slots: int  # that were its own; those it shared through the prefix cache are not among them
    output_tokens: int


@dataclass(frozen=True)
class Evicted(Event):
    """The prefix cache has given slots up, since they were needed."""

    slots: int
    readers: tuple[int, ...] = ()  # the requests that read in this step, if it was for them, and not for a round


@dataclass(frozen=True)
class Finished(Event):
    """A request is at its end, for the reason that its Generation gives."""

    request: int
    reason: str
    output_tokens: int
    rounds: int


# --- what there is between two steps --------------------------------------------------------------------------------


class Page(NamedTuple):
    """One page of the pool. Free: nobody holds it, and it is not cached."""

    holder: int | None = None  # the request whose own it is
    cached: bool = False  # the prefix cache's
    readers: tuple[int, ...] = ()  # requests that have it, as a cached prefix, in their table


@dataclass(frozen=True)
class RequestState:
    """One request, as it is between two steps."""

    number: int
    state: str  # "waiting", "reading", "running" or "done"
    finish_reason: str | None  # of one that is done
    prompt_tokens: int
    read_tokens: int  # of those that it must have in the KV cache before it runs: found there, or read
    tokens_to_read: int  # all of these
    output_ids: tuple[int, ...]
    newest: int  # how many of them the last step brought
    accept_lens: tuple[int, ...]
    found_tokens: int  # that the prefix cache had for it when it was admitted; again, if it was retracted
    retractions: int

    @property
    def accept_length(self) -> float | None:
        """Tokens per round, the bonus counted; None before its first round."""
        return sum(self.accept_lens) / len(self.accept_lens) if self.accept_lens else None


@dataclass(frozen=True)
class Snapshot:
    """All requests and the whole pool between two steps; the counts go back to the watch's first look."""

    step: int
    mode: ForwardMode | None  # of the last step; None if nobody was there
    requests: list[RequestState]  # by number
    pages: list[Page]  # of the pool, in the order of their numbers; the dummy page is left out
    page_size: int
    free_slots: int
    cached_slots: int  # the prefix cache's
    read_slots: int  # of these, the ones that requests read
    rounds: int
    request_rounds: int
    committed_tokens: int  # by rounds
    retractions: int
    found_tokens: int
    evicted_tokens: int

    @property
    def slots(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def held_slots(self) -> int:
        """Those that are requests' own."""
        return self.slots - self.free_slots - self.cached_slots


# --- the watch ------------------------------------------------------------------------------------------------------

COUNTERS = ("rounds", "request_rounds", "committed_tokens", "retractions", "cached_tokens", "evicted_tokens")


@dataclass
class _Seen:
    """A request as it was at the last look."""

    holding: bool = False
    read: int = 0
    to_read: int = 0
    own_slots: int = 0
    output: int = 0
    newest: int = 0
    found: int = 0
    retractions: int = 0
    finished: bool = False

    @staticmethod
    def of(request: Request, page_size: int, output_before: int) -> _Seen:
        own_pages = -(-request.held_len // page_size) - request.cached_len // page_size
        output = len(request.output_ids)
        return _Seen(
            holding=request.row != 0,
            read=request.kv_len,
            to_read=request.read_len,
            own_slots=own_pages * page_size,
            output=output,
            newest=output - output_before,
            found=request.found_tokens,
            retractions=request.retractions,
            finished=request.finish_reason is not None,
        )


class Watch:
    """Follows an engine from now on, and all requests that are in it or come to it. See the module's docstring.

    requests: those that it has seen, by number. steps: those that it took, or was told of by `look`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self.steps = 0
        self.mode: ForwardMode | None = None
        self._seen: dict[Request, _Seen] = {}
        self._found: dict[Request, int] = {}  # at the latest admission
        self._told: set[Request] = set()  # those that wait, and of which it is told why
        self._start = self._counts()
        self._last = self._start

    @property
    def unfinished(self) -> list[Request]:
        """Requests that wait or run, those among them that were added since the last look."""
        seen = [request for request in self.requests if request.finish_reason is None]
        return seen + [request for request in self.engine.scheduler.waiting if request not in self._seen]

    def step(self, observer: Observer | None = None) -> list[Event]:
        """Take one step of the engine, and say what happened. Raises what `Engine.step` raises."""
        events = self._arrivals(self.steps + 1)
        self.engine.step(observer)
        return events + self.look()

    def look(self) -> list[Event]:
        """What has happened since the last look, if somebody else took a step: room first, then each request."""
        self.steps += 1
        arrived, counts = self._arrivals(self.steps), self._counts()
        changed = {name: counts[name] - self._last[name] for name in counts}
        self._last = counts
        self.mode = None
        if changed["launches"] or changed["rounds"]:  # a round's launch and its results may be in two steps
            self.mode = ForwardMode.DECODE
        elif changed["prefills"]:
            self.mode = ForwardMode.EXTEND
        room: list[Event] = []
        others: list[Event] = []
        for number, request in enumerate(self.requests):
            seen = self._seen[request]
            if seen.finished:
                seen.newest = 0
                continue
            output_before = seen.output
            if request.retractions > seen.retractions:
                if not request.row and len(request.output_ids) > seen.output:  # from a round that was in flight
                    room.append(Committed(self.steps, number, len(request.output_ids) - seen.output, in_round=True))
                    seen.output = len(request.output_ids)
                room.append(Retracted(self.steps, number, seen.own_slots, seen.output))
                seen.holding = False
            others += self._progress(number, request, seen)
            self._seen[request] = _Seen.of(request, self.engine.allocator.page_size, output_before)
        if changed["evicted_tokens"]:
            reads = self.mode is ForwardMode.EXTEND
            readers = tuple(event.request for event in others if isinstance(event, Read)) if reads else ()
            room.insert(0, Evicted(self.steps, changed["evicted_tokens"], readers))
        return [*arrived, *room, *others, *self._waits()]

    def snapshot(self) -> Snapshot:
        """What there is now: new lists, which later steps leave alone."""
        cache, allocator = self.engine.scheduler.cache, self.engine.allocator
        now = {name: count - self._start[name] for name, count in self._counts().items()}
        return Snapshot(
            step=self.steps,
            mode=self.mode,
            requests=[self._state(number, request) for number, request in enumerate(self.requests)],
            pages=self._pages(),
            page_size=allocator.page_size,
            free_slots=allocator.available(),
            cached_slots=cache.evictable_size + cache.protected_size if cache else 0,
            read_slots=cache.protected_size if cache else 0,
            rounds=now["rounds"],
            request_rounds=now["request_rounds"],
            committed_tokens=now["committed_tokens"],
            retractions=now["retractions"],
            found_tokens=now["cached_tokens"],
            evicted_tokens=now["evicted_tokens"],
        )

    # --- behind it ----------------------------------------------------------------------------------------------

    def _counts(self) -> dict[str, int]:
        stats = self.engine.stats
        forwards = {"prefills": stats.prefill_target_forwards, "launches": stats.target_forwards}
        return {**{name: getattr(stats, name) for name in COUNTERS}, **forwards}

    def _arrivals(self, step: int) -> list[Event]:
        """Take in requests that are new here, whether they wait, or run already."""
        scheduler, events = self.engine.scheduler, list[Event]()
        there: Iterable[Request] = [*scheduler.waiting, *scheduler.running.requests, *filter(None, [scheduler.chunked])]
        for request in sorted(there, key=lambda request: request.arrival):
            if request not in self._seen:
                events.append(Arrived(step, len(self.requests), len(request.prompt_ids)))
                self.requests.append(request)
                size = self.engine.allocator.page_size
                self._seen[request] = _Seen.of(request, size, len(request.output_ids))
        return events

    def _progress(self, number: int, request: Request, seen: _Seen) -> list[Event]:
        """What became of one request since `seen`; its retraction, if there was one, is told already."""
        step, again, holding = self.steps, request.retractions > 0, request.row != 0
        new_tokens = len(request.output_ids) - seen.output
        events: list[Event] = []
        start, to_read = seen.read, seen.to_read
        if not seen.holding and (holding or new_tokens):
            start = self._found[request] = request.found_tokens - seen.found
            self._told.discard(request)
            events.append(Admitted(step, number, start, to_read - start, again))
        if (holding or new_tokens) and start < to_read:
            # Whoever has ended meanwhile had read all of it, or had no new token.
            end = min(request.kv_len, to_read) if holding else to_read
            if end > start:
                events.append(Read(step, number, end - start, to_read - end, again))
        if new_tokens:
            events.append(Committed(step, number, new_tokens, in_round=self.mode is ForwardMode.DECODE))
        if request.finish_reason is not None:
            rounds = len(request.accept_lens)
            events.append(Finished(step, number, request.finish_reason, len(request.output_ids), rounds))
        return events

    def _waits(self) -> list[Event]:
        """Why the head of the queue waits, if the scheduler has refused it and it is not told yet."""
        scheduler, allocator, cache = self.engine.scheduler, self.engine.allocator, self.engine.scheduler.cache
        request = scheduler.refused
        if request is None or request in self._told:
            return []
        found, room = 0, allocator.available()
        if cache:
            # The scheduler has looked the same up when it refused, and nobody since: the order of eviction stays.
            ids = request.read_ids
            match = cache.match_prefix(ids if scheduler.worker.reads_ahead else ids[:-1])
            cache.inc_lock_ref(match.node)
            found, room = len(match.slots), room + cache.evictable_size
            cache.dec_lock_ref(match.node)
        readers = [(request.kv_len, request.read_len) for request in filter(None, [scheduler.chunked])]
        readers.append((found, request.read_len))
        needed = sum(allocator.slots_to_extend([start], [end]) for start, end in readers)
        running, ends = scheduler.running, [end for _, end in readers]
        needed += scheduler.worker.slots_for_round([*running.prefix_lens, *ends], [*running.held_lens, *ends])
        if needed <= room:  # a round has filled less than it might have
            return []
        self._told.add(request)
        number = self.requests.index(request)
        return [Waits(self.steps, number, needed, room, len(scheduler.waiting) - 1)]

    def _state(self, number: int, request: Request) -> RequestState:
        holding = request.row != 0
        state = "reading" if request.unread_len else "running"
        if request.finish_reason is not None:
            state = "done"
        elif not holding:
            state = "waiting"
        return RequestState(
            number=number,
            state=state,
            finish_reason=request.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            read_tokens=min(request.kv_len, request.read_len),
            tokens_to_read=request.read_len,
            output_ids=tuple(request.output_ids),
            newest=self._seen[request].newest,
            accept_lens=tuple(request.accept_lens),
            found_tokens=self._found.get(request, request.found_tokens),
            retractions=request.retractions,
        )

    def _pages(self) -> list[Page]:
        allocator, cache, table = self.engine.allocator, self.engine.scheduler.cache, self.engine.table.req_to_token
        size = allocator.page_size
        pages = [Page()] * (allocator.size // size)
        if cache:
            for page in set((cache.held_slots() // size - 1).tolist()):
                pages[page] = Page(cached=True)
        for number, request in enumerate(self.requests):
            if request.row:
                held = (table[request.row, : request.held_len] // size - 1).tolist()
                for page in dict.fromkeys(held[: request.cached_len]):
                    pages[page] = pages[page]._replace(readers=(*pages[page].readers, number))
                for page in held[request.cached_len :]:
                    pages[page] = Page(holder=number)
        return pages
