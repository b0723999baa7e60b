"""`refspec generate`: prompts in, texts out, and on a terminal how they came about."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from refspec.cli.algorithm import PLAIN, SPEC_FIELDS, algorithm_name, given_options, option_of, spec_of, steps_list
from refspec.cli.command_line import UsageError, shows_progress
from refspec.cli.option_names import option_names, with_option_names
from refspec.cli.record import trace_writer
from refspec.cli.render import round_views
from refspec.cli.report import counts_table, most_telling, print_text, summary
from refspec.cli.viewer import show_rounds
from refspec.cli.wording import plural
from refspec.config import MATCH_TYPES, SAMPLERS, SamplingParams, SpecConfig
from refspec.trace import Round

if TYPE_CHECKING:
    from refspec.engine.engine import Engine, Generation

DTYPES = ("float32", "float64", "bfloat16", "float16")
BACKENDS = ("auto", "torch", "triton")
RETRACTIONS = ("newest", "largest", "least_output")  # the engine's
# What help says of options whose default depends on the algorithm.
TOPK_DEFAULT = f"{SpecConfig.topk}, or the algorithm's"
STEPS_DEFAULT = f"{SpecConfig.num_steps}, or the algorithm's"
DRAFT_TOKENS_DEFAULT = f"{SpecConfig.num_draft_tokens}, or as many as there are; of a chain S + 1"
PATIENCE_SECONDS = 1.0  # a run that is over by then shows no progress bar
MOST_LENS = 60  # accept lengths that are listed one by one
MOST_LOGPROBS = 40  # tokens whose log-probabilities are: --json has all of them


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser for an option with these values."""

    def parse(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of: {', '.join(choices)}")
        return value

    return parse


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts to continue, together in one batch.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The whole file is one prompt, without the line break at its very end; - is standard input. "
            "May be given several times.",
        ),
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(parser=algorithm_name, metavar="NAME", help="How to speculate: see below; none: token by token."),
    ] = SpecConfig.algorithm,
    topk: Annotated[
        int, typer.Option(metavar="K", help="Branches that the draft follows.", show_default=TOPK_DEFAULT)
    ] = SpecConfig.topk,
    steps: Annotated[
        int, typer.Option(metavar="S", help="Levels of the draft's tree.", show_default=STEPS_DEFAULT)
    ] = SpecConfig.num_steps,
    draft_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Nodes that the target verifies, the root included.", show_default=DRAFT_TOKENS_DEFAULT
        ),
    ] = SpecConfig.num_draft_tokens,
    adaptive_steps: Annotated[
        str | None,
        typer.Option(
            parser=steps_list,
            metavar="S,S,...",
            help="Of a chain: choose each round's steps among these, by what the last rounds accepted.",
            show_default="the same in every round",
        ),
    ] = None,
    exact_branch_kv: Annotated[
        bool, typer.Option(help="Let a draft branch attend its true ancestors; else as SGLang does.")
    ] = SpecConfig.exact_branch_kv,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Output tokens for each prompt, at most.")
    ] = SamplingParams.max_new_tokens,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on where the model ends its text.")
    ] = SamplingParams.ignore_eos,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(metavar="ID", help="A token id that ends the output. May be given several times."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A text that ends the output, and is cut off. Taken as it is: a shell writes a line break as $'\\n'. "
            "May be given several times.",
        ),
    ] = None,
    include_stop_str: Annotated[
        bool, typer.Option("--include-stop-str", help="Leave the text of --stop in the output.")
    ] = SamplingParams.include_stop_str_in_output,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sample, with the logits divided by this; 0: take the likeliest token.")
    ] = SamplingParams.temperature,
    top_k: Annotated[
        int, typer.Option(metavar="N", help="Sample among so many of the likeliest tokens; 0: among all.")
    ] = SamplingParams.top_k,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample among the likeliest tokens that have this probability together.")
    ] = SamplingParams.top_p,
    min_p: Annotated[
        float, typer.Option(metavar="P", help="Sample among tokens at least this share as likely as the likeliest.")
    ] = SamplingParams.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="P", help="Divide the logits of tokens that the output holds; 1: leave them.")
    ] = SamplingParams.repetition_penalty,
    frequency_penalty: Annotated[
        float, typer.Option(metavar="P", help="Taken off a token's logit each time that the output holds it.")
    ] = SamplingParams.frequency_penalty,
    presence_penalty: Annotated[
        float, typer.Option(metavar="P", help="Taken off the logits of tokens that the output holds.")
    ] = SamplingParams.presence_penalty,
    exact_penalties: Annotated[
        bool, typer.Option(help="Count drafts for the penalties as if decoded one by one; else as SGLang does.")
    ] = SpecConfig.exact_penalties,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=B", help="Add this to the logit of a token id. May be given several times."),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The output is JSON of this schema, as far as the budget goes. Needs llguidance."
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Show the log-probability of each token, and of the N likeliest in its place.",
            show_default="not shown",
        ),
    ] = SamplingParams.logprobs,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of all prompts: the same again is sampled again.", show_default="a new one"),
    ] = SamplingParams.seed,
    sampler: Annotated[
        str,
        typer.Option(
            parser=one_of(*SAMPLERS),
            metavar="|".join(SAMPLERS),
            help="How drafts are judged where tokens are sampled; the last two along a chain, --topk 1.",
        ),
    ] = SpecConfig.sampler,
    threshold_single: Annotated[
        float, typer.Option(metavar="P", help="Below 1: accept any draft at least this likely. Bends the law.")
    ] = SpecConfig.threshold_single,
    threshold_acc: Annotated[
        float, typer.Option(metavar="P", help="Below 1: accept as if drafts were 1/P times as likely. Bends the law.")
    ] = SpecConfig.threshold_acc,
    ngram_max_trie_depth: Annotated[
        int,
        typer.Option(metavar="N", help="Of ngram: tokens of a match and of what followed it, together."),
    ] = SpecConfig.ngram_max_trie_depth,
    ngram_max_bfs_breadth: Annotated[
        int, typer.Option(metavar="N", help="Of ngram: different tokens that are guessed after a match, at most.")
    ] = SpecConfig.ngram_max_bfs_breadth,
    ngram_match_type: Annotated[
        str,
        typer.Option(
            parser=one_of(*MATCH_TYPES),
            metavar="|".join(MATCH_TYPES),
            help="Of ngram: guess first what followed latest, or most often.",
        ),
    ] = SpecConfig.ngram_match_type,
    ngram_capacity: Annotated[
        int, typer.Option(metavar="N", help="Of ngram: pieces of text that are remembered.")
    ] = SpecConfig.ngram_capacity,
    target: Annotated[
        str, typer.Option(metavar="NAME|DIR", help="A shipped model, or a folder in the Hugging Face layout.")
    ] = "tiny",
    draft: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR", help="The same, for the draft.", show_default="that of a shipped target"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(parser=one_of(*DTYPES), metavar="|".join(DTYPES), help="Of weights and cache.")
    ] = DTYPES[0],
    device: Annotated[
        str | None, typer.Option(metavar="D", help="cpu, cuda, cuda:1 ...", show_default="a GPU if there is one")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            parser=one_of(*BACKENDS),
            metavar="|".join(BACKENDS),
            help="Who runs the operations: their references in torch, or Triton kernels, which a CPU can only "
            "interpret, very slowly; auto: kernels on a GPU.",
        ),
    ] = BACKENDS[0],
    kv_slots: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens that the KV pool holds.", show_default="the engine's")
    ] = None,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Record decode forwards once and replay them; on a CPU that gains nothing, and can be tried.",
            show_default="on a GPU with the kernels",
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(metavar="N", help="Tokens in a page of the pool.")] = SpecConfig.page_size,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Prompts that begin alike share what has been read of them.")
    ] = False,
    chunk_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Prompt tokens that are read in one step.", show_default="any number"),
    ] = None,
    retraction: Annotated[
        str,
        typer.Option(
            parser=one_of(*RETRACTIONS),
            metavar="|".join(RETRACTIONS),
            help="Who loses its slots and waits again when there are too few: who came last, who holds most, or who "
            "has brought least.",
        ),
    ] = RETRACTIONS[0],
    max_running: Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests that run at one time; others wait.", show_default="the engine's"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go through the rounds, by key; then the rest.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all rounds to this file, for refspec trace show.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Continue prompts, by speculation or plainly.

    On a terminal: the text, in which tokens that one round brought look alike; the tree of the round that accepted
    most; and what the run took.
    """
    plain = algorithm == PLAIN
    _check_options(ctx, plain=plain, watch=watch, trace=trace, as_json=as_json)
    prompts = [*(prompt or []), *map(read_prompt, prompt_file or [])]
    if not prompts:
        raise UsageError('no prompt: give at least one, as in refspec generate "def fib(n):"')
    schema = _read_schema(json_schema) if json_schema else None
    spec = spec_of(ctx, algorithm, page_size)  # it matters which options were given, and ctx knows
    with option_names(UsageError):
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple(stop_token_id or ()),
            ignore_eos=ignore_eos,
            stop=tuple(stop or ()),
            include_stop_str_in_output=include_stop_str,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=_logit_bias(logit_bias or []),
            logprobs=logprobs,
            seed=seed,
        )
    check_sampling_options(ctx)

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    quiet = not shows_progress(as_json)
    rounds: list[Round] = []
    # Recording costs a little time in every round: not where nobody looks at it.
    observer = None if plain or (as_json and not trace) else rounds.append
    with trace_writer(trace) as save, option_names(ValueError):
        with nullcontext() if quiet else errors.status("loading the models"):
            from refspec.engine.engine import Engine
            from refspec.engine.record import make_trace
            from refspec.workers.registry import find_algorithm

            pool: dict[str, Any] = {
                "kv_slots": kv_slots,
                "max_running": max_running,
                "page_size": page_size,
                "prefix_cache": prefix_cache,
                "chunk_size": chunk_size,
                "retraction": retraction,
                "graphs": graphs,
            }
            given = {name: value for name, value in pool.items() if value is not None}
            engine = Engine(target, draft, spec, device, dtype, backend, **given)
        announce_interpreter(engine.backend, as_json)
        print_notes(engine, as_json)
        settings = asdict(params)
        if schema is not None:
            params, settings["grammar"] = replace(params, grammar=engine.json_grammar(schema)), schema
        with TokenProgress(engine, len(prompts) * params.max_new_tokens, errors, disable=quiet):
            generations = engine.generate(prompts, params, observer)
        config = {
            "algorithm": algorithm,
            **{name: getattr(spec, name, None) for name in SPEC_FIELDS.values()},
            **settings,
            "target": target,
            "draft": None if spec is None else draft or find_algorithm(spec.algorithm).shipped_draft,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device),
            "backend": engine.backend,
            **pool,
            "kv_slots": engine.allocator.size,
            "graphs": list(engine.graphs),
            "max_running": engine.scheduler.max_running,
            "trace": None if trace is None else str(trace),
            "prompts": prompts,
        }
        record = make_trace(engine, config, prompts, generations, rounds)
        save(record)

    stats = engine.stats.as_dict()
    if as_json:
        printed = {"generations": list(map(asdict, generations)), "stats": stats, "config": config}
        typer.echo(json.dumps({**printed, "notes": engine.notes}))
        return
    views = round_views(record)
    if watch and views:
        show_rounds(console, views)
    for i, (text, generation) in enumerate(zip(prompts, generations, strict=True)):
        if len(prompts) > 1:
            console.rule(f"prompt {i}", align="left", style="dim")
        print_text(console, text, _blocks(engine, generation))
        console.print(f"\n{_how_it_came(generation, plain)}\n", style="dim", markup=False)
        if generation.finish_reason == "dead_end":
            console.print(
                "The schema is not complete, and allows nothing that the model can say next.\n", soft_wrap=True
            )
        if generation.finish_reason == "out_of_slots":
            needed = engine.scheduler.slots_to_start(len(engine.encode(text)) + len(generation.token_ids) - 1)
            console.print(
                f"The KV pool of {engine.allocator.size} slots was too small for more of it, which takes {needed}. "
                "Raise --kv-slots.\n",
                soft_wrap=True,
            )
        if schema is not None and generation.finish_reason == "length":
            console.print("The JSON is cut off by the budget: raise --max-new-tokens.\n", soft_wrap=True)
        if generation.logprobs is not None:
            console.print(_logprobs_table(engine, generation))
            console.print()
    if views and not watch:
        console.print(most_telling(views))
        console.print()
    console.print(counts_table(stats))
    console.print(summary(stats, sum(len(generation.token_ids) for generation in generations)))
    if trace:
        typer.echo(f"To see all rounds again: refspec trace show {shlex.quote(str(trace))}")


class TokenProgress(Progress):
    """A bar that looks for itself, at the engine's counters, how far the run is: decoding is not slowed by it."""

    def __init__(self, engine: Engine, most_tokens: int, console: Console, disable: bool) -> None:
        self.stats, self.started = engine.stats, time.monotonic()
        columns = (TextColumn("decoding"), BarColumn(), TextColumn("{task.completed} of at most {task.total} tokens"))
        super().__init__(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False, disable=disable
        )
        self.bar = self.add_task("decoding", total=most_tokens)

    def get_renderables(self) -> Iterable[RenderableType]:
        if time.monotonic() - self.started > PATIENCE_SECONDS:
            self.update(self.bar, completed=self.stats.committed_tokens)
            yield from super().get_renderables()


def announce_interpreter(backend: str, as_json: bool) -> None:
    """One line on stderr if Triton's interpreter will run the kernels, which is why nothing seems to happen."""
    from refspec.kernels.backend import interpreting

    if backend == "triton" and interpreting() and not as_json:
        typer.echo("Triton's interpreter runs the kernels here: a round takes seconds.", err=True)


def print_notes(engine: Engine, as_json: bool) -> None:
    """On stderr, what the engine does otherwise than it was asked for. In JSON it stands beside the results."""
    for note in engine.notes if not as_json else ():
        typer.echo(f"refspec: {with_option_names(note)}", err=True)


def _check_options(ctx: typer.Context, plain: bool, watch: bool, trace: Path | None, as_json: bool) -> None:
    if watch and as_json:
        raise UsageError("--watch shows rounds, --json prints nothing but JSON: leave one of them out")
    if plain and (watch or trace):
        option = "--watch" if watch else "--trace"
        raise UsageError(f"{option} with --algorithm none: plain decoding has no rounds to show, leave one of them out")


def check_sampling_options(ctx: typer.Context) -> None:
    """Nobody who asks for a filter means greedy decoding, unless it is asked for as well. Raises UsageError."""
    given = given_options(ctx)
    filters = [name for name in ("top_k", "top_p", "min_p", "seed") if name in given]
    if filters and "temperature" not in given:
        raise UsageError(
            f"{option_of(ctx, filters[0])} without --temperature: it is for sampling, so give both (or --temperature 0)"
        )


def read_prompt(file: Path) -> str:
    """The text of a prompt file, or of standard input for "-". Raises ValueError for what is no UTF-8."""
    raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {file} is not UTF-8 text (byte {error.start})") from None
    return text.replace("\r\n", "\n").removesuffix("\n")


def _read_schema(file: Path) -> dict[str, Any]:
    try:
        schema = json.loads(file.read_bytes())
    except ValueError as error:  # JSON's errors, and UTF-8's
        raise ValueError(f"the JSON schema {file} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"the JSON schema {file} is nested too deeply") from None
    if not isinstance(schema, dict):
        raise ValueError(f"the JSON schema {file} must be an object; an empty one allows any JSON")
    return schema


def _logit_bias(given: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for item in given:
        token, _, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias {item!r} is not of the form ID=B, a token id and a number") from None
    if len(biases) < len(given):
        raise UsageError("--logit-bias names an id twice: leave one of them out")
    return biases


def _logprobs_table(engine: Engine, generation: Generation) -> Table:
    """One line for each token: its log-probability, and beside it the likeliest tokens in its place."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    assert generation.logprobs is not None
    assert generation.top_logprobs is not None
    table.add_column("token")
    table.add_column("log-probability", justify="right")
    if any(generation.top_logprobs):
        table.add_column("likeliest")

    def shown(token: int) -> Text:
        return Text(repr(engine.decode([token])))

    lines = list(zip(generation.token_ids, generation.logprobs, generation.top_logprobs, strict=True))
    for token, logprob, likeliest in lines[:MOST_LOGPROBS]:
        words = Text("  ").join(Text.assemble(shown(other), f" {value:.3f}") for other, value in likeliest)
        table.add_row(shown(token), f"{logprob:.3f}", *([words] if likeliest else []))
    if len(lines) > MOST_LOGPROBS:
        table.caption = f"and {len(lines) - MOST_LOGPROBS} tokens more, which --json shows"
    return table


def _blocks(engine: Engine, generation: Generation) -> list[str]:
    """The output's text, cut where a round began. What a stop string has cut off is in no block."""
    ends = list(accumulate([1, *generation.accept_lens]))
    # Bytes that do not yet make up a character wait for the next block.
    cuts = [len(engine.decode(generation.token_ids[:end]).rstrip("\ufffd")) for end in ends[:-1]]
    return [generation.text[start:end] for start, end in pairwise([0, *accumulate(cuts, max), None])]


def _how_it_came(generation: Generation, plain: bool) -> str:
    how = f"{plural(len(generation.token_ids), 'token')}, finish reason {generation.finish_reason}"
    if isinstance(generation.matched_stop, str):
        how += f" at {generation.matched_stop!r}"
    if generation.seed is not None:
        how += f", seed {generation.seed}"
    if plain:
        return how
    lens = " ".join(map(str, generation.accept_lens[:MOST_LENS]))
    more = " ..." if len(generation.accept_lens) > MOST_LENS else ""
    return f"{how}; by round: 1 (prefill) {lens}{more}"
