"""The engine as its users see it: prompts in, texts out, exact counts on the side."""

from __future__ import annotations

import operator
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from refspec.config import SamplingParams, SpecConfig, require_int
from refspec.engine.scheduler import RETRACTION_POLICIES, Scheduler
from refspec.kernels.backend import resolve_backend, use_backend
from refspec.memory.allocator import SlotAllocator
from refspec.memory.kv_pool import TokenToKVPool
from refspec.memory.prefix_cache import PrefixCache
from refspec.memory.req_table import ReqTable
from refspec.models.checkpoint import find_checkpoint, load_target, load_tokenizer
from refspec.models.scripted import ScriptedModel
from refspec.requests.finish import matched_stop
from refspec.requests.json_grammar import JsonGrammar
from refspec.requests.output_text import OutputText
from refspec.requests.request import Request, prompt_name
from refspec.runtime.graphs import GraphRunner, capture_sizes
from refspec.runtime.runner import ModelRunner, ServedModel
from refspec.workers.base import Observer, Stats, Worker
from refspec.workers.plain import PlainWorker
from refspec.workers.registry import GivenDraft, Setup, clash_with, find_algorithm, layers_of, require_finite

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Of a request that is none of a run's prompts, which are counted from 0: a stream's, or one of add_request.
STREAM_INDEX = -1

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """What became of one prompt. len(token_ids) = 1 + sum(accept_lens): the first token is the prefill's."""

    text: str  # of the output alone, cut at a stop string; ids with spaces between where the model has no tokenizer
    token_ids: list[int]  # the token that is a stop, or completes a stop string, is kept
    # "stop": a stop token, a stop string, or the end of a grammar; "length": the budget or the context is used up;
    # "dead_end": the grammar allows nothing that the model can say; "out_of_slots": the KV pool was too small for it
    # alone; "abort"
    finish_reason: str
    accept_lens: list[int]  # tokens committed in each round, the bonus included
    matched_stop: int | str | None = None  # what stopped it: the token's id, or the stop string; None: a grammar's end
    seed: int | None = None  # that the tokens were sampled with: the params' own or the engine's; None: greedy
    logprobs: list[float] | None = None  # the model's own, of each token; None where params do not ask for them
    # Of each token's place the likeliest ids and their log-probabilities, params.logprobs of them.
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class StreamBlock:
    """What one step brought: an accepted block, whole. Where a request ends without a new token, out of slots or at a
    dead end, the last one is empty.
    """

    token_ids: list[int]
    text: str  # bytes that are not yet a character, and what may yet be a stop string, wait for a later block
    finish_reason: str | None  # set in the last block
    matched_stop: int | str | None = None  # likewise
    logprobs: list[float] | None = None  # as in Generation, of these tokens
    top_logprobs: list[list[tuple[int, float]]] | None = None


class Engine:
    """A target, perhaps a draft, one pool of KV slots, and a queue.

    target, draft: the name of shipped weights ("tiny", "tiny-eagle"), a folder in the Hugging Face layout, or a
        model object; draft also the layers of a multi-layer draft, a list of model objects. draft may be left out where
        a shipped draft belongs to the target.
    spec: how to speculate; None decodes plainly, one token for each target forward.
    device: "cpu", "cuda", ...; None takes a GPU where there is one. dtype: "float32" (the default), "float64",
        "bfloat16", "float16", or a torch.dtype. A model object keeps its own of both.
    backend: who runs the operations of refspec.kernels, attention among them: "torch", their references; "triton", the
        kernels, which on a CPU run in Triton's interpreter, about a hundred times slower; "auto", the kernels on a GPU.
        What it comes to is in .backend afterwards.
    kv_slots: tokens that the KV pool holds. max_running: requests that run at one time; others wait.
    page_size: tokens in a page of the pool; None: the spec's, or 1.
    prefix_cache: keep what requests leave behind, for those that begin alike. The output stays the same, but for
        rounding; what a run costs then depends on the runs before it.
    chunk_size: prompt tokens that are read in one step; None: any number.
    retraction: who loses the slots when there are too few for the next round: "newest", who came last; "largest", who
        holds most; "least_output", who has brought least.
    graphs: whether decoding replays graphs (runtime/graphs.py): True, False, or the batch sizes to capture. None: on a
        GPU with the kernels, for models that have weights. On a CPU nothing is gained, but buffers and padding can be
        tried. The sizes are in .graphs afterwards.

    What is done otherwise than it was asked for, and why, is in .notes afterwards, a line for each.

    An engine is for one thread. Raises ValueError (CheckpointError for a model folder) with one line that says what is
    wrong.
    """

    def __init__(
        self,
        target: str | Path | ServedModel = "tiny",
        draft: GivenDraft | None = None,
        spec: SpecConfig | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        backend: str = "auto",
        kv_slots: int = 8192,
        max_running: int = 32,
        page_size: int | None = None,
        prefix_cache: bool = False,
        chunk_size: int | None = None,
        retraction: str = "newest",
        graphs: bool | Sequence[int] | None = None,
    ) -> None:
        require_int("kv_slots", kv_slots, at_least=1)
        require_int("max_running", max_running, at_least=1)
        if chunk_size is not None:
            require_int("chunk_size", chunk_size, at_least=1)
        if retraction not in RETRACTION_POLICIES:
            raise ValueError(f"retraction is {retraction!r}, it must be one of: {', '.join(RETRACTION_POLICIES)}")
        for name, size in (("kv_slots", kv_slots), ("max_running", max_running)):
            if size >= 2**31:
                raise ValueError(f"{name} is {size}, it must be below 2147483648")
        if spec is not None and not isinstance(spec, SpecConfig):
            raise ValueError(f"spec is {spec!r}, it must be a SpecConfig, or None to decode plainly")
        parts = [draft] if isinstance(draft, str | Path | None) else layers_of(draft)
        for name, model in (("target", target), *(("draft", part) for part in parts)):
            if not isinstance(model, str | Path | None) and not hasattr(model, "kv_layout"):
                raise ValueError(f"{name} is {model!r}, it must be a shipped name, a folder or a model object")
        if target is None:
            raise ValueError("target is None, it must be a shipped name, a folder or a model object")
        page_size = _page_size(page_size, spec)
        if kv_slots % page_size:
            raise ValueError(f"page_size is {page_size}, which does not divide the pool of kv_slots = {kv_slots}")
        self.spec = spec
        self.device = _device_of(target, device)
        self.backend = resolve_backend(backend, self.device)
        on_gpu = self.device.type == "cuda"
        scripted = any(isinstance(model, ScriptedModel) for model in (target, *parts))
        has_weights = isinstance(target, str | Path | nn.Module) and not scripted
        self.graphs = capture_sizes(graphs, on_gpu and self.backend == "triton" and has_weights, max_running)
        if self.graphs and on_gpu and self.backend != "triton":
            raise ValueError("graphs on a GPU need the backend triton: leave one of the two out")
        if self.graphs and on_gpu and scripted:
            raise ValueError(
                "graphs on a GPU cannot hold a scripted model, which asks the host for every word: leave them out"
            )
        self.tokenizer: Tokenizer | None = None
        self.target_model = self._load_target(target, resolve_dtype(dtype))
        self.dtype = self.target_model.kv_layout.dtype
        self.stats = Stats()
        self.notes: list[str] = []
        target_config = self.target_model.config
        # Rows of the output head beyond the tokenizer's ids are padding, whatever their logits say.
        vocab_size = target_config.vocab_size
        if self.tokenizer is not None:
            vocab_size = min(vocab_size, 1 + max(self.tokenizer.get_vocab().values()))
        self.vocab_size, self.max_context = vocab_size, target_config.max_position_embeddings

        self.allocator = SlotAllocator(kv_slots, self.device, page_size)
        self.table = ReqTable(max_running, _table_width(self.max_context, spec), self.device)
        worker: Worker
        if spec is None:
            if draft is not None:
                raise ValueError("a draft model is given, but spec=None decodes without one: give spec=SpecConfig(...)")
            worker = PlainWorker(self._runner(self.target_model, {"target": 1}), self.allocator, self.stats)
        else:
            if spec.num_candidates and spec.topk > vocab_size:
                raise ValueError(f"topk is {spec.topk}, but the vocabulary has only {vocab_size} ids")
            algorithm = find_algorithm(spec.algorithm)
            algorithm.check(spec)
            if clash := clash_with(spec.algorithm):
                self.notes.append(clash)
            worker = algorithm.build(
                Setup(
                    config=spec,
                    target=self.target_model,
                    shipped_draft=algorithm.shipped_draft if target == "tiny" else None,
                    draft=draft,
                    allocator=self.allocator,
                    stats=self.stats,
                    dtype=self.dtype,
                    device=self.device,
                    make_runner=self._runner,
                    note=self.notes.append,
                )
            )
            if not isinstance(worker, Worker):
                raise ValueError(f"algorithm {spec.algorithm} has built {worker!r}, which is no Worker")
            _refuse_branching_state(worker, spec)
        cache = PrefixCache(self.allocator, worker.reads_ahead) if prefix_cache else None
        policy = RETRACTION_POLICIES[retraction]
        self.scheduler = Scheduler(worker, self.allocator, self.table, max_running, cache, chunk_size, policy)

    # --- use ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        observer: Observer | None = None,
    ) -> list[Generation]:
        """Decode all prompts, batched as the pool allows; results in the prompts' order.

        params: one for all, or one for each. observer is called with the trace of every speculative round.
        Raises ValueError for a prompt that cannot be served, or a stop that can never occur, before any is served.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts is {prompts!r}: give a list of prompts")
        if any(isinstance(prompt, Integral) for prompt in prompts):
            raise ValueError("prompts is a single list of ids: give a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(param, SamplingParams) for param in params):
            raise ValueError(f"params is {params!r}: give one SamplingParams, or a list of one for each prompt")
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} SamplingParams: give one, or one for each")
        requests = [
            self.make_request(i, prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))
        ]
        for request in requests:
            self.scheduler.add(request)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step(observer)
        finally:
            for request in requests:
                self.scheduler.abort(request)
        return [self.result(request) for request in requests]

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, index: int = STREAM_INDEX) -> Request:
        """Queue one prompt, at any time between two steps. `step` moves it, until it has a finish_reason.

        index: what traces call it. Raises ValueError for what `generate` would refuse.
        """
        request = self.make_request(index, prompt, params or SamplingParams())
        self.scheduler.add(request)
        return request

    def step(self, observer: Observer | None = None) -> None:
        """One step of everybody who is there: prompts are read, or each running request gets its next tokens.

        observer: called with the trace of the round that this step launches, when its results are looked at: where
        rounds overlap, in a later step.
        If it raises, every request is aborted, and the engine is as good as new.
        """
        with use_backend(self.backend):
            self.scheduler.step(observer)

    def abort(self, request: Request) -> None:
        """End a request, whether it waits or runs; its slots are free when no round in flight may write them any more.
        One that has finished stays as it is.
        """
        self.scheduler.abort(request)

    def result(self, request: Request) -> Generation:
        """What became of a request that has finished. Raises ValueError for one that has not."""
        if request.finish_reason is None:
            raise ValueError("the request has not finished: take steps, or abort it")
        text = self.decode(request.output_ids)
        return Generation(
            text=text[: len(text) - request.text.cut] if request.text else text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason,
            accept_lens=request.accept_lens,
            matched_stop=matched_stop(request) if request.output_ids else None,
            seed=request.seed if request.params.temperature else None,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            top_logprobs=None if request.params.logprobs is None else request.top_logprobs,
        )

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamBlock]:
        """Decode one prompt, block by block. Closing the iterator ends the request.

        What `generate` would refuse is refused with the same ValueError, at once and not at the first block.
        The blocks' texts join to the one that `generate` gives, but for decoders that take a character back when bytes
        that make up none follow it (byte fallback does). Other streams and `generate` may run in between. Raises
        RuntimeError if a failure of theirs ended this one.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}: give a SamplingParams")
        request = self.make_request(STREAM_INDEX, prompt, params or SamplingParams())
        request.text = request.text or OutputText(self.decode)
        return self._stream(request)

    def json_grammar(self, schema: Mapping[str, Any]) -> JsonGrammar:
        """For SamplingParams.grammar: outputs that are JSON of this schema, in the target's tokens.

        Raises ValueError for a schema that cannot be followed, a target without tokenizer or end-of-text id, and where
        the package llguidance is not installed.
        """
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer, so there is no text that could be JSON")
        return JsonGrammar(schema, self.tokenizer, self.vocab_size, self.target_model.config.eos_token_ids)

    def check(self) -> None:
        """Do free and owned slots add up to the pool? Raises IntegrityError that names the slots and holders."""
        self.scheduler.check()

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt. Raises ValueError for an empty one, or for ids that the model does not have."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this target has no tokenizer: give prompts as lists of token ids")
            if not prompt.isascii() and prompt.encode(errors="replace").decode() != prompt:
                raise ValueError("the prompt holds characters that are no text (it was not UTF-8)")
            ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        elif not isinstance(prompt, Iterable):
            raise ValueError(f"a prompt is {prompt!r}: give a text, or a list of token ids")
        else:
            ids = [operator.index(token) if hasattr(token, "__index__") else token for token in prompt]
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token id {token!r} in the prompt is not in the vocabulary, ids 0 to {self.vocab_size - 1}"
                )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out; without a tokenizer the ids themselves, with spaces between."""
        if self.tokenizer is None:
            return " ".join(map(str, token_ids))
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def make_request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        """A request that is in no queue yet: `scheduler.add` queues it. index: which prompt of a run it is.

        Raises ValueError for a prompt that cannot be served, or a stop that can never occur.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}, it must be SamplingParams")
        ids, name = self.encode(prompt), prompt_name(index)
        if len(ids) >= self.max_context:
            raise ValueError(
                f"{name} has {len(ids)} tokens, but the model's context is {self.max_context}, "
                "of which the output needs at least 1: shorten the prompt"
            )
        for token in params.stop_token_ids:
            if token >= self.vocab_size:
                raise ValueError(
                    f"stop token id {token} of {name} is not in the vocabulary of {self.vocab_size} ids, "
                    f"0 to {self.vocab_size - 1}: nothing would ever stop at it"
                )
        for token in params.logit_bias:
            if token >= self.vocab_size:
                raise ValueError(
                    f"logit_bias of {name} names id {token}, but the vocabulary is ids 0 to {self.vocab_size - 1}"
                )
        if (params.logprobs or 0) > self.vocab_size:
            raise ValueError(
                f"logprobs is {params.logprobs} for {name}, but the vocabulary has only {self.vocab_size} ids"
            )
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.target_model.config.eos_token_ids)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        request = Request(index, ids, params, frozenset(stops), self.max_context, seed=seed)
        if params.grammar:
            request.matcher = params.grammar.matcher()
            if request.matcher.finished:
                raise ValueError(f"the grammar of {name} allows no output: it is complete before the first token")
        if params.stop:
            self._require_text_of(params.stop)
            request.text = OutputText(self.decode, params.stop, params.include_stop_str_in_output)
        needed = self.scheduler.slots_to_start(len(ids))
        if needed > self.allocator.size:
            raise ValueError(
                f"{name} has {len(ids)} tokens, and needs {needed} KV slots for them and its first round, "
                f"the pool has {self.allocator.size}: raise kv_slots"
            )
        return request

    # --- behind it ------------------------------------------------------------------------------------------------

    def _runner(
        self, model: ServedModel, rows: Mapping[str, int | Sequence[int]], pool: TokenToKVPool | None = None
    ) -> ModelRunner:
        """rows: by phase, what each request has of them at most, in forwards that a graph may hold."""
        slots = self.allocator
        basics = model, slots.size, self.device, self.stats.forwards, self.vocab_size, slots.page_size
        if not self.graphs:
            return ModelRunner(*basics, pool=pool)
        counts = self.stats.graph_replays, self.stats.graph_fallbacks
        return GraphRunner(*basics, self.table.req_to_token, self.graphs, rows, *counts, pool)

    def _require_text_of(self, stops: Sequence[str]) -> None:
        """Raises ValueError for stop strings that no output can hold."""
        if self.tokenizer is None:
            raise ValueError(
                "this target has no tokenizer, so there is no text to find stop strings in: use stop_token_ids"
            )
        for token, added in self.tokenizer.get_added_tokens_decoder().items():
            if added.special and added.content in stops:
                raise ValueError(
                    f"the stop string {added.content!r} is a special token, which is not part of a text: "
                    f"give its id, {token}, in stop_token_ids"
                )

    def _stream(self, request: Request) -> Iterator[StreamBlock]:
        self.scheduler.add(request)
        assert request.text is not None
        sent_tokens = 0
        try:
            reason = None
            while reason is None:
                if request.finish_reason is None and sent_tokens == len(request.output_ids):
                    self.step()
                    continue
                reason = request.finish_reason
                if reason == "abort" and sent_tokens == len(request.output_ids):
                    break
                piece = request.text.take(last=reason is not None)
                matched = matched_stop(request) if reason == "stop" else None
                asked = request.params.logprobs is not None
                block = StreamBlock(
                    request.output_ids[sent_tokens:],
                    piece,
                    reason,
                    matched,
                    request.logprobs[sent_tokens:] if asked else None,
                    request.top_logprobs[sent_tokens:] if asked else None,
                )
                # Before the yield: while this stream rests, others may take steps in which its request goes on.
                sent_tokens = len(request.output_ids)
                yield block
            if reason == "abort":
                raise RuntimeError("this request was aborted, since a step of the engine failed")
        finally:
            if not sys.is_finalizing():  # then torch is gone, and the pool with it
                self.scheduler.abort(request)

    def _load_target(self, target: str | Path | ServedModel, dtype: torch.dtype) -> ServedModel:
        if not isinstance(target, str | Path):
            require_finite(target, "target")
            return target
        folder = find_checkpoint(target)
        self.tokenizer = load_tokenizer(folder)
        return load_target(folder, dtype, self.device)


def _page_size(page_size: int | None, spec: SpecConfig | None) -> int:
    """Raises ValueError for one that is no size, or not the spec's."""
    if page_size is None:
        return spec.page_size if spec else 1
    require_int("page_size", page_size, at_least=1)
    if spec and spec.page_size != page_size:
        raise ValueError(f"page_size is {page_size}, but spec.page_size is {spec.page_size}: leave one of them out")
    return page_size


def _refuse_branching_state(worker: Worker, spec: SpecConfig) -> None:
    """Raises ValueError where drafts branch and a model keeps a state that cannot: `ServedModel.recurrent_state`.

    Source: SGLang: python/sglang/srt/layers/attention/linear/lightning_backend.py:LightningAttentionBackend @0.5.23,
    which refuses for the same reason. Its Triton kernels for other such models look up each row's parent, and take
    trees.
    """
    if spec.is_chain:
        return
    branches, remedy = f"topk is {spec.topk}", "set topk=1"
    if spec.looks_up:
        branches, remedy = f"algorithm is {spec.algorithm!r}, which guesses trees", "take one with a topk, and topk=1"
    for runner in worker.runners:
        if getattr(runner.model, "recurrent_state", False):
            role = "target" if runner is worker.target else "draft"
            raise ValueError(
                f"{branches}, but the {role} keeps a recurrent state, which each row takes over from the row before "
                f"it, so that drafts cannot branch: {remedy}"
            )


def _table_width(max_context: int, spec: SpecConfig | None) -> int:
    """Columns of the request table: a round's slots may reach beyond the context, and two rounds may be in flight."""
    if spec is None:
        return max_context
    return spec.round_end(max_context + 2 * spec.longest_path)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """None: a GPU where there is one. Raises ValueError for a device that is not here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.zeros(1, device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} cannot be used here ({reason}); `refspec doctor` says what can") from None
    return resolved


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """None: float32. Raises ValueError for a dtype that weights are not kept in."""
    if dtype is None:
        return torch.float32
    resolved = DTYPES.get(str(dtype).removeprefix("torch."))
    if resolved is None:
        raise ValueError(f"dtype is {dtype!r}, it must be one of: {', '.join(DTYPES)}")
    return resolved


def _device_of(target: str | Path | ServedModel, device: str | torch.device | None) -> torch.device:
    """Where to run: a target object's own device, else the one asked for. Raises ValueError if both differ."""
    if not isinstance(target, nn.Module):
        return resolve_device(device)
    own = next(target.parameters()).device
    if device is not None and resolve_device(device).type != own.type:
        raise ValueError(f"device is {device!r}, but the target object is on {own}: move it, or leave device out")
    return own
