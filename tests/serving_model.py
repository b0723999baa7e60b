"""A whole engine, driven at random beside what can be foretold of it.

`ServingModel` holds an engine with scripted models and does to it whatever a user may: it adds requests that begin like
earlier ones or go on where those ended, takes steps, aborts, retracts, opens and leaves streams, evicts, calls
`generate` in between, lets a model or an observer fail in the middle of a step. What must hold is looked at after every
step of the engine, those within `generate` and streams included:

- slots, rows of the table, cache and locks add up (`Engine.check`), and every slot in use holds the target's and the
  draft's row of just that token: this is asked of the pools themselves;
- the batch says of each request what the request says, and the draft's first guesses are those for its text;
- greedy output is what the target's function says, cut by the finish rules; whatever is sampled, and every accept
  length, is what the same request comes to in a roomy engine, in other company;
- a draft that equals its target is never wrong; who waits does so in the order of arrival; who has left holds nothing.

And an engine that is only stepped brings everybody to an end within so many steps as `ServingModel.drain` says.

Run as a script, it takes as many engine steps as asked:  python tests/serving_model.py 1000000 [SEED]
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from builders import NextLogits, agreeing_now_and_then, assert_all_free, hash_of
from serving import slots_for

from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardMode
from refspec.engine.engine import StreamBlock
from refspec.engine.scheduler import RETRACTION_POLICIES
from refspec.memory.prefix_cache import TreeNode
from refspec.models.scripted import NO_HIDDEN_INPUT, ScriptedModel
from refspec.requests.request import Request, RunningBatch
from refspec.trace import Round
from refspec.workers.base import Observer, RoundInFlight

VOCAB = 5
CONTEXT = 28  # tokens that a request may come to
LIVE = 5  # requests that are there at one time, those of `generate` not counted
TREES = [(1, 1, 2), (1, 2, 3), (1, 3, 4), (1, 3, 3), (1, 4, 5), (2, 1, 3), (2, 2, 4), (2, 3, 6), (3, 2, 6), (4, 2, 9)]

Action = tuple[str, int, int, int]


class Broken(Exception):
    """What a model or an observer raises here when it is to fail."""


# --- words ----------------------------------------------------------------------------------------------------------


def quick_logits(salt: int) -> NextLogits:
    """Logits from 0 to 4 in steps of 1/1024, out of one hash of the whole context. Ties happen, and are meant to."""

    def next_logits(context: list[int]) -> list[float]:
        bits = hash_of(context, salt)
        return [(bits >> 12 * token & 0xFFF) / 1024 for token in range(VOCAB)]

    return next_logits


def quick_peaks(salt: int) -> NextLogits:
    """As quick_logits, but one id is far above the others, so that every tree holds the target's path."""
    below = quick_logits(salt)

    def next_logits(context: list[int]) -> list[float]:
        logits = list(below(context))
        logits[hash_of(context, salt + 1) % VOCAB] = 16.0
        return logits

    return next_logits


def best_first(logits: Sequence[float]) -> list[int]:
    """The ids, the likeliest first; ties to the lower id."""
    return sorted(range(VOCAB), key=lambda token: (-logits[token], token))


# --- what one run is about ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The engine's settings."""

    spec: SpecConfig | None
    page_size: int
    pages: int
    max_running: int
    chunk_size: int | None
    prefix_cache: bool
    retraction: str
    draft_errs: bool  # else it is the target
    eos: tuple[int, ...]

    @staticmethod
    def drawn(seed: int, algorithm: str = "eagle") -> Shape:
        """With a pool between what the shortest prompts just start with, and more than is ever used."""
        dice = random.Random(seed)
        page_size = dice.choice([1, 1, 2, 4, 16])
        k, steps, nodes = dice.choice(TREES)
        samplers = ["target_only", "rejection", "block"] if (k, nodes) == (1, steps + 1) else ["target_only"]
        spec = SpecConfig(algorithm, k, steps, nodes, page_size, exact_branch_kv=True, sampler=dice.choice(samplers))
        shape = Shape(
            spec if dice.random() < 0.75 else None,
            page_size,
            pages=0,
            max_running=dice.choice([1, 2, 2, 3, 3, 4, 6]),
            chunk_size=dice.choice([None, None, 1, 2, 3, 5, 8]),
            prefix_cache=dice.random() < 0.7,
            retraction=dice.choice(sorted(RETRACTION_POLICIES)),
            draft_errs=dice.random() < 0.5,
            eos=dice.choice([(), (VOCAB - 1,)]),
        )
        just_enough = shape.pages_for(dice.randrange(6, CONTEXT))
        return replace(shape, pages=just_enough + dice.choice([0, 0, 1, 2, 4, 30]) * -(-4 // page_size))

    def pages_for(self, kv_len: int) -> int:
        """Pages that a request of so many tokens needs for itself and one round."""
        return slots_for(self.spec, self.page_size, kv_len) // self.page_size

    @property
    def full_round(self) -> int:
        """Tokens that a round brings if no draft of the target's path is wrong, and none is lacking in the tree."""
        return 1 + min(self.spec.num_steps, self.spec.num_draft_tokens - 1) if self.spec else 1

    def models(self) -> tuple[NextLogits, NextLogits]:
        """What target and draft say."""
        wide = self.spec is not None and self.spec.topk > 1
        target = quick_logits(1) if self.draft_errs or not wide else quick_peaks(1)
        return target, agreeing_now_and_then(target, quick_logits(3)) if self.draft_errs else target

    def engine(self, target: NextLogits, draft: NextLogits) -> Engine:
        return WatchedEngine(
            ScriptedModel(target, VOCAB, CONTEXT, self.eos),
            ScriptedModel(draft, VOCAB, CONTEXT) if self.spec else None,
            self.spec,
            device="cpu",
            backend="torch",
            kv_slots=self.pages * self.page_size,
            max_running=self.max_running,
            page_size=self.page_size,
            prefix_cache=self.prefix_cache,
            chunk_size=self.chunk_size,
            retraction=self.retraction,
        )


class WatchedEngine(Engine):
    """Tells the model of every step, whoever asks for it."""

    model: ServingModel

    def step(self, observer: Observer | None = None) -> None:
        self.model.before_step()
        try:
            super().step(observer)
        except Broken:
            self.model.forgive_uncounted()
            raise
        finally:
            self.model.after_step()


@dataclass
class OpenStream:
    blocks: Iterator[StreamBlock]
    prompt: list[int]
    request: Request | None = None  # it joins the queue with the first block
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None


# --- the model ------------------------------------------------------------------------------------------------------


class ServingModel:
    """The methods named in ACTIONS are what may happen; they take whatever numbers and make sense of them."""

    # With how often each comes, for one of the others.
    ACTIONS: ClassVar = {
        "add": 12,
        "step": 12,
        "abort": 1,
        "retract": 2,
        "open_stream": 1,
        "advance_stream": 3,
        "close_stream": 1,
        "evict": 1,
        "generate": 1,
        "fail_in_a_model": 1,
        "fail_in_an_observer": 1,
        "drain": 1,
    }

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.target, self.draft = shape.models()
        self.fuse: int | None = None  # rows that the models still answer
        self.engine = shape.engine(self._fused(self.target), self._fused(self.draft))
        self.engine.model = self  # type: ignore[attr-defined]
        self.scheduler, self.worker = self.engine.scheduler, self.engine.scheduler.worker
        self.live: list[Request] = []
        self.finished: list[Request] = []
        self.streams: list[OpenStream] = []
        self.texts = [[hash_of([text, p]) % VOCAB for p in range(CONTEXT)] for text in range(3)]
        self.left_tokens = self.left_retractions = 0  # of requests that have finished
        self.uncounted = 0  # tokens of rounds that failed after their commit
        self.chunk_is_begun = self.has_moved = False
        self.seen: Counter[str] = Counter()  # what happened how often, so that tests can tell that it did
        self._watch_forwards()

    # --- actions ------------------------------------------------------------------------------------------------

    def add(self, a: int, b: int, c: int) -> None:
        prompt, params = self._prompt(a, b), self._params(c)
        if len(self.live) >= LIVE:
            return
        try:
            self.live.append(self.engine.add_request(prompt, params))
        except ValueError:
            assert not self._can_start(prompt)
            self.seen["refused"] += 1
        else:
            assert self._can_start(prompt)
        self.check()

    def step(self, a: int, b: int, c: int) -> None:
        """Up to eight, but none where nobody is left."""
        self.engine.step()
        for _ in range(a % 8):
            if self.live:
                self.engine.step()

    def abort(self, a: int, b: int, c: int) -> None:
        self._until_half_read(b % 4)
        if self.live:
            request = self._one_of(self.live, a)
            self.seen["abort of " + self._state(request)] += 1
            self.engine.abort(request)
            assert request.finish_reason == "abort"
            self.check()

    def retract(self, a: int, b: int, c: int) -> None:
        self._until_half_read(b % 4)
        holders = self._holders()
        if holders:
            request = self._one_of(holders, a)
            self.seen["retraction of " + self._state(request)] += 1
            self.scheduler.retract(request)
            assert request.finish_reason or self._state(request) == "waiting"
            self.check()

    def open_stream(self, a: int, b: int, c: int) -> None:
        prompt = self._prompt(a, b)
        if len(self.streams) < 2 and self._can_start(prompt):
            self.streams.append(OpenStream(self.engine.stream(prompt, self._params(c)), prompt))

    def advance_stream(self, a: int, b: int, c: int) -> None:
        if not self.streams:
            return
        stream = self.streams[a % len(self.streams)]
        try:
            block = next(stream.blocks)
        except StopIteration:
            assert stream.reason
            assert stream.request
            assert stream.reason == stream.request.finish_reason
            assert stream.tokens == stream.request.output_ids
            self.seen["stream to its end"] += 1
            self.streams.remove(stream)
        except RuntimeError:
            assert stream.request is None or stream.request.finish_reason == "abort"
            self.streams.remove(stream)
        else:
            self._take_block(stream, block)

    def close_stream(self, a: int, b: int, c: int) -> None:
        if self.streams:
            stream = self.streams.pop(a % len(self.streams))
            stream.blocks.close()  # type: ignore[attr-defined]
            assert stream.request is None or stream.request.finish_reason
            self.check()

    def evict(self, a: int, b: int, c: int) -> None:
        cache = self.scheduler.cache
        if cache:
            wanted, evictable, free = 1 + a % 8, cache.evictable_size, self.engine.allocator.available()
            freed = cache.evict(wanted)
            assert freed >= min(wanted, evictable)
            assert self.engine.allocator.available() == free + freed
            self.check()

    def generate(self, a: int, b: int, c: int) -> None:
        prompts = [self._prompt(a + i, b + 5 * i) for i in range(1 + a % 3)]
        params = [self._params(c + i) for i in range(len(prompts))]
        if not all(map(self._can_start, prompts)):
            return
        results = self.engine.generate(prompts, params)
        for prompt, param, result in zip(prompts, params, results, strict=True):
            (request,) = [r for r in self.finished if r.output_ids is result.token_ids]
            assert (request.prompt_ids, request.params) == (prompt, param)
            assert result.finish_reason in ("stop", "length", "out_of_slots")
        self.seen["generate"] += 1

    def fail_in_a_model(self, a: int, b: int, c: int) -> None:
        """In any forward, after any number of rows."""
        self.fuse = a % 30
        self._fail(None)
        self.fuse = None

    def fail_in_an_observer(self, a: int, b: int, c: int) -> None:
        def observer(round_: Round) -> None:
            self.engine.check()
            raise Broken

        self._fail(observer)

    def drain(self, a: int, b: int, c: int) -> None:
        """Everybody comes to an end, within a bound that can be told beforehand.

        A round brings each of its requests a token, so there are no more rounds than tokens left; and for each of them,
        where they overlap, one that came too late. After a round nobody is admitted twice before the next, and each who
        is admitted reads a chunk at least in a step of his.
        """
        self.before_step()
        tokens = sum(request.params.max_new_tokens - len(request.output_ids) for request in self.live)
        chunks = -(-CONTEXT // (self.shape.chunk_size or CONTEXT))
        bound = (1 + 2 * tokens) * (1 + len(self.live) * (1 + chunks))
        self.seen["drained"] += bool(self.live)
        for _ in range(bound):
            if not self.live:
                break
            self.engine.step()
        assert not self.live, f"{len(self.live)} requests have not come to an end after {bound} steps"

    # --- what actions are made of -------------------------------------------------------------------------------

    def _prompt(self, a: int, b: int) -> list[int]:
        """The begin of a text, or of what an earlier request came to; perhaps with an end of its own."""
        earlier = [*self.finished[-4:], *self.live]
        known = [*self.texts, *(request.all_ids for request in earlier)]
        text = known[a % len(known)]
        length = len(text) if b % 4 == 0 else 1 + b % 13
        own_end = [a % VOCAB] * (b // 13 % 3 if b % 2 else 0)
        return (text[:length] + own_end)[: CONTEXT - 1 - b % 7]

    def _params(self, c: int) -> SamplingParams:
        dice = random.Random(c)
        greedy = dice.random() < 0.7
        return SamplingParams(
            max_new_tokens=dice.choice([1, 2, 3, 5, 8, 13, 30]),
            stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice([0, 0, 0, 1]))),
            ignore_eos=dice.random() < 0.3,
            temperature=0.0 if greedy else dice.choice([0.3, 1.0, 3.0]),
            top_k=0 if greedy else dice.choice([0, 0, 3]),
            top_p=1.0 if greedy else dice.choice([1.0, 0.8]),
            min_p=0.0 if greedy else dice.choice([0.0, 0.1]),
            seed=dice.randrange(5),
        )

    def _can_start(self, prompt: list[int]) -> bool:
        return self.shape.pages_for(len(prompt)) <= self.shape.pages

    def _until_half_read(self, steps: int) -> None:
        """Up to so many steps, until a prompt is half read: one seldom is, just when something is to happen to it."""
        for _ in range(steps):
            if self.live and not self.scheduler.chunked:
                self.engine.step()

    def _one_of(self, requests: list[Request], number: int) -> Request:
        """Every second time the one whose prompt is half read."""
        if self.scheduler.chunked and number % 2:
            return self.scheduler.chunked
        return requests[number % len(requests)]

    def _holders(self) -> list[Request]:
        """Of slots, and they have not ended."""
        chunked = self.scheduler.chunked
        return [*self.scheduler.running.requests, *([chunked] if chunked else [])]

    def _state(self, request: Request) -> str:
        if request in self.scheduler.waiting:
            return "waiting"
        return "chunked" if request is self.scheduler.chunked else "running"

    def _fused(self, next_logits: NextLogits) -> NextLogits:
        def answer(context: list[int]) -> Sequence[float]:
            if self.fuse is not None:
                self.fuse -= 1
                if self.fuse < 0:
                    raise Broken
            return next_logits(context)

        return answer

    def _fail(self, observer: Observer | None) -> None:
        """One step that may fail: then everybody who was there has ended, and nobody holds anything but the cache.

        An observer is told of a round when its results are looked at: that may take another step.
        """
        self.before_step()
        there = list(self.live)
        try:
            self.engine.step(observer)
            in_flight = self.scheduler.in_flight
            while observer and in_flight and self.scheduler.in_flight is in_flight:
                there = list(self.live)
                self.engine.step()
        except Broken:
            assert all(request.finish_reason for request in there)
            cached = self.scheduler.cache.evictable_size if self.scheduler.cache else 0
            assert self.engine.allocator.available() + cached == self.engine.allocator.size
            self.seen["failed"] += 1

    def _take_block(self, stream: OpenStream, block: StreamBlock) -> None:
        assert stream.reason is None, "a block after the last one"
        if stream.request is None:  # nobody came after it
            stream.request = max([*self.live, *self.finished], key=lambda request: request.arrival)
            assert stream.request.prompt_ids == stream.prompt
        stream.tokens += block.token_ids
        stream.reason = block.finish_reason
        assert stream.request.output_ids[: len(stream.tokens)] == stream.tokens
        assert block.token_ids or block.finish_reason == "out_of_slots"

    def _watch_forwards(self) -> None:
        """A chunk is no longer than it may be, and none follows another while somebody waits for a round."""
        forward, launch, shape = self.worker.forward, self.worker.launch, self.shape

        def watched(batch: RunningBatch, mode: ForwardMode, observer: Observer | None = None) -> RunningBatch:
            self.has_moved, others = True, bool(self.scheduler.running)
            if mode is ForwardMode.EXTEND:
                assert sum(batch.extend_lens) <= (shape.chunk_size or sum(batch.extend_lens))
                assert all(batch.extend_lens)
                assert len(batch) + len(self.scheduler.running) + len(self.scheduler.leaving) <= shape.max_running
                assert not (self.chunk_is_begun and others), "a chunk right after a chunk"
                self.chunk_is_begun = any(
                    n < r.unread_len for r, n in zip(batch.requests, batch.extend_lens, strict=True)
                )
                self.seen["chunked"] += self.chunk_is_begun
            else:
                self.chunk_is_begun = False
            return forward(batch, mode, observer)

        def launched(batch: RunningBatch, observer: Observer | None = None) -> tuple[RunningBatch, RoundInFlight]:
            self.has_moved, self.chunk_is_begun = True, False
            return launch(batch, observer)

        self.worker.forward, self.worker.launch = watched, launched  # type: ignore[method-assign]

    # --- what must hold -----------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Get to know those whom `generate` and streams have queued."""
        self.live += [request for request in self.scheduler.waiting if request not in self.live]
        self.seen["steps"] += bool(self.live)
        self.has_moved = not self.live

    def after_step(self) -> None:
        """Where anybody is there, no step is idle: somebody was moved, or has ended."""
        assert self.has_moved or any(request.finish_reason for request in self.live), "an idle step"
        self.check()

    def check(self) -> None:
        self.engine.check()
        waiting = [request.arrival for request in self.scheduler.waiting]
        assert waiting == sorted(waiting)
        self._check_batch()
        self._check_pools()
        for request in list(self.live):
            self._check_request(request)
        for request in self.finished[-2 * LIVE :]:
            self._check_that_it_leaves(request)
        self._check_counts()

    def _check_batch(self) -> None:
        """What the device knows of those that run is what the host knows, and what a round in flight has brought."""
        batch = self.scheduler.running
        requests = batch.requests
        texts = [request.all_ids + self._in_flight(request) for request in requests]
        assert batch.rows.tolist() == [request.row for request in requests]
        assert batch.seq_lens.tolist() == [len(text) - 1 for text in texts]
        assert all(len(text) - 1 <= bound for text, bound in zip(texts, batch.prefix_lens, strict=True))
        assert self.scheduler.in_flight or batch.prefix_lens == batch.seq_lens.tolist()
        assert batch.bonus_tokens.tolist() == [text[-1] for text in texts]
        if requests and self.shape.spec and not self.shape.spec.drafts_are_drawn:
            assert batch.draft_input
            best = [best_first(self.draft(text))[: self.shape.spec.topk] for text in texts]
            assert batch.draft_input.topk_index.tolist() == best

    def _in_flight(self, request: Request) -> list[int]:
        """The tokens that it has got from a round whose results the host has not waited for."""
        in_flight = self.scheduler.in_flight
        if in_flight is None or request not in in_flight.requests:
            return []
        assert self.shape.spec
        results, r = in_flight.results._host, in_flight.requests.index(request)
        return results["predict"].view(-1, self.shape.spec.num_draft_tokens)[r, : results["accept_lens"][r]].tolist()

    def _check_pools(self) -> None:
        """Each slot of a request or of the cache holds the rows of its token, the target's and the draft's."""
        slots: list[int] = []
        tokens: list[tuple[int, int, int]] = []  # token, the one after it, position
        for request in [*self._holders(), *self.scheduler.leaving]:
            ids, n = request.all_ids, request.kv_len
            assert 0 <= request.cached_len <= request.written_len == n <= len(ids) - 1
            slots += self.engine.table.req_to_token[request.row, :n].tolist()
            tokens += zip(ids[:n], ids[1:], range(n), strict=False)
        if self.scheduler.cache:
            self._collect(self.scheduler.cache.root, 0, slots, tokens)
        where = torch.tensor(slots, dtype=torch.int64)
        rows = self.worker.target.pool.layers[0][where, 0, 0].tolist()
        assert rows == [[NO_HIDDEN_INPUT, token, position] for token, _, position in tokens]
        if self.shape.spec:
            rows = self.worker.draft_runner.pool.layers[0][where, 0, 0].tolist()  # type: ignore[attr-defined]
            assert rows == [list(row) for row in tokens]

    def _collect(self, node: TreeNode, above: int, slots: list[int], tokens: list[tuple[int, int, int]]) -> None:
        slots += node.slots.tolist()
        for position, unit in enumerate(node.key, above):
            tokens.append((*unit, position) if isinstance(unit, tuple) else (unit, 0, position))
        for child in node.children.values():
            self._collect(child, above + len(node.key), slots, tokens)

    def _check_request(self, request: Request) -> None:
        assert sum(request.accept_lens) == max(0, len(request.output_ids) - 1)
        if request.finish_reason is None:
            assert (request in self.scheduler.waiting) + (request in self._holders()) == 1
            return
        self.live.remove(request)
        self.finished.append(request)
        self.left_tokens += sum(request.accept_lens)
        self.left_retractions += request.retractions
        reason, full = request.finish_reason, self.shape.full_round
        self.seen[reason] += 1
        self.seen["retracted"] += request.retractions > 0
        assert all(1 <= n <= full for n in request.accept_lens)
        if not self.shape.draft_errs and (request.params.temperature == 0 or self._drafts_are_drawn):
            whole = request.accept_lens[:-1] if reason in ("stop", "length") else request.accept_lens
            assert set(whole) <= {full}, "a draft that equals its target was wrong"
        if reason == "out_of_slots":
            assert self.shape.pages_for(len(request.all_ids) - 1) > self.shape.pages
        if request.params.temperature == 0:
            output, why = self._foretold(request)
            assert request.output_ids == (output if reason in ("stop", "length") else output[: len(request.output_ids)])
            assert reason in (why, "abort", "out_of_slots")

    def _check_that_it_leaves(self, request: Request) -> None:
        """One that has ended holds nothing, or is in a round in flight, and held for that."""
        assert request not in self.scheduler.waiting
        assert request not in self._holders()
        if request not in self.scheduler.leaving:
            assert (request.row, request.held_len, request.cached_len, request.cache_node) == (0, 0, 0, None)
            assert request.in_flight_tokens == 0
            return
        assert self.scheduler.leaving.count(request) == 1
        assert self.scheduler.in_flight
        assert request in self.scheduler.in_flight.requests
        self.seen["leaving"] += 1

    @property
    def _drafts_are_drawn(self) -> bool:
        return self.shape.spec is not None and self.shape.spec.drafts_are_drawn

    def _foretold(self, request: Request) -> tuple[list[int], str]:
        """What a greedy request says, and why it ends."""
        ids, params, output = list(request.prompt_ids), request.params, list[int]()
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.shape.eos)}
        while True:
            output.append(best_first(self.target(ids))[0])
            ids.append(output[-1])
            if output[-1] in stops:
                return output, "stop"
            if len(output) == params.max_new_tokens or len(ids) == CONTEXT:
                return output, "length"

    def _check_counts(self) -> None:
        stats = self.engine.stats
        assert stats.committed_tokens + self.uncounted == self._tokens_of_rounds()
        assert stats.retractions == self.left_retractions + sum(request.retractions for request in self.live)

    def _tokens_of_rounds(self) -> int:
        return self.left_tokens + sum(sum(request.accept_lens) for request in self.live)

    def forgive_uncounted(self) -> None:
        """A round that fails after its commit has brought tokens, and is not counted."""
        self.uncounted = self._tokens_of_rounds() - self.engine.stats.committed_tokens

    def settle(self) -> None:
        """At the end: nothing is held, and all outputs and accept lengths are what a roomy engine comes to."""
        self.drain(0, 0, 0)
        stats = self.engine.stats
        self.seen += Counter({"tokens found in the cache": stats.cached_tokens, "tokens evicted": stats.evicted_tokens})
        while self.streams:
            self.close_stream(0, 0, 0)
        if self.scheduler.cache:
            self.scheduler.cache.evict(self.scheduler.cache.evictable_size)
        assert_all_free(self.engine)
        spec = self.shape.spec and replace(self.shape.spec, algorithm="eagle", page_size=1)
        draft = ScriptedModel(self.draft, VOCAB, CONTEXT) if spec else None
        roomy = Engine(ScriptedModel(self.target, VOCAB, CONTEXT, self.shape.eos), draft, spec, device="cpu")
        asked = {(tuple(request.prompt_ids), request.params): None for request in self.finished}
        results = roomy.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        expected = dict(zip(asked, results, strict=True))
        for request in self.finished:
            result = expected[tuple(request.prompt_ids), request.params]
            output, accept_lens = request.output_ids, request.accept_lens
            if request.finish_reason in ("abort", "out_of_slots"):
                assert output == result.token_ids[: len(output)]
                assert accept_lens == result.accept_lens[: len(accept_lens)]
            else:
                assert (output, accept_lens) == (result.token_ids, result.accept_lens)
                assert request.finish_reason == result.finish_reason


# --- runs -----------------------------------------------------------------------------------------------------------


def actions_of(dice: random.Random) -> Iterator[Action]:
    """Without end."""
    names, weights = list(ServingModel.ACTIONS), list(ServingModel.ACTIONS.values())
    while True:
        (name,) = dice.choices(names, weights)
        yield name, dice.getrandbits(16), dice.getrandbits(16), dice.getrandbits(16)


@torch.inference_mode()
def drive(shape: Shape, actions: Iterable[Action], steps: int) -> Counter[str]:
    """Do the actions until the engine has taken so many steps. Whatever fails, the shape and the actions are printed,
    so that `drive(Shape(...), [...], steps)` does it again. Returns what was seen."""
    model, done = ServingModel(shape), list[Action]()
    try:
        for action in actions:
            name, *numbers = action
            done.append(action)
            getattr(model, name)(*numbers)
            if model.seen["steps"] >= steps:
                break
        model.settle()
    except BaseException:
        print(f"drive({shape},\n{done}, {steps})", file=sys.stderr, flush=True)
        raise
    return model.seen


def main(steps: int, seed: int) -> None:
    """Runs of 500 steps, each with a shape and actions of its own seed, until there were `steps`; v1 and v2 in turn."""
    started, seen, reported = time.monotonic(), Counter[str](), 0
    while seen["steps"] < steps:
        try:
            algorithm = ("eagle", "eagle-v2")[seed % 2]
            seen += drive(Shape.drawn(seed, algorithm), actions_of(random.Random(seed)), 500)
        except BaseException:
            print(f"seed {seed}, after {seen['steps']} steps of other seeds", file=sys.stderr, flush=True)
            raise
        seed += 1
        if seen["steps"] - reported >= 10_000 or seen["steps"] >= steps:
            reported = seen["steps"]
            print(f"{reported} steps, {time.monotonic() - started:.0f} s, next seed {seed}, {dict(seen)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
