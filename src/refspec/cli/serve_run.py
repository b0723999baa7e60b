"""A run of `refspec serve-demo`: prompts that arrive, steps, and what it came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from refspec.cli.serve_view import News, ServeView, label
from refspec.cli.wording import plural
from refspec.config import SamplingParams
from refspec.engine.compare import Difference, first_difference
from refspec.engine.engine import Engine
from refspec.engine.watch import Admitted, Arrived, Event, Read, Watch
from refspec.requests.request import Request, prompt_name


@dataclass
class Run:
    """Prompts that come to an engine one after the other, and what happens to them.

    every: a prompt comes after so many steps, or as soon as nobody else is there. Raises ValueError, before anything is
    served, for a prompt that the engine refuses.
    """

    watch: Watch
    prompts: list[str]
    params: SamplingParams
    every: int
    requests: list[Request] = field(init=False)  # for each prompt; those behind the first so many are still to come
    arrived: int = 0
    events: list[Event] = field(default_factory=list)
    news: News = field(default_factory=News)
    most_running: int = 0  # at one time

    def __post_init__(self) -> None:
        self.requests = [self._request(i, prompt) for i, prompt in enumerate(self.prompts)]

    def _request(self, i: int, prompt: str) -> Request:
        try:
            return self.watch.engine.make_request(i, prompt, self.params)
        except ValueError as error:
            name = prompt_name(i)
            raise ValueError(str(error).replace(name, f"{name} ({label(i)})", 1)) from None

    @property
    def is_over(self) -> bool:
        return self.arrived == len(self.requests) and not self.watch.unfinished

    def steps(self) -> Iterator[list[tuple[int, str]]]:
        """Serve all of them; the news of each step."""
        watch = self.watch
        while not self.is_over:
            while self.arrived < len(self.requests) and (
                watch.steps >= self.every * self.arrived or not watch.unfinished
            ):
                watch.engine.scheduler.add(self.requests[self.arrived])
                self.arrived += 1
            events = watch.step()
            self.events += events
            self.most_running = max(self.most_running, len(watch.engine.scheduler.running))
            yield self.news.add(events)

    def view(self, fills_screen: bool = False) -> ServeView:
        """This moment as a picture."""
        to_come = len(self.requests) - self.arrived
        return ServeView(self.watch.snapshot(), self.news.lines, self.watch.engine.decode, to_come, fills_screen)

    # --- what it came to ----------------------------------------------------------------------------------------

    def differences(self) -> dict[int, tuple[Difference | None, str]]:
        """By prompt: where its output leaves the one that it gives alone, in a pool without pages, prefix cache, chunks
        and other requests; and what that means. An output that the pool has cut short is compared as far as it goes.

        The verdicts are "rounding", "fault", and "unknown", for a sampled token: what it hangs on is not only the gap
        between the two best logits. In float64 rounding is no excuse. None in place of a difference: the
        tokens are the same, but not how they ended.
        """
        engine = self.watch.engine
        alone = Engine(spec=engine.spec and replace(engine.spec, page_size=1), dtype=engine.dtype)
        found: dict[int, tuple[Difference | None, str]] = {}
        for i, request in enumerate(self.requests):
            params = replace(self.params, seed=request.seed)
            [expected] = alone.generate([request.prompt_ids], params)
            ids, reason = expected.token_ids, expected.finish_reason
            if request.finish_reason == "out_of_slots":
                ids, reason = ids[: len(request.output_ids)], request.finish_reason
            difference = first_difference(alone, request.prompt_ids, ids, request.output_ids)
            if difference:
                sampled = self.params.temperature > 0 and difference.gap_limit > 0
                verdict = "unknown" if sampled else "rounding" if difference.is_rounding else "fault"
                found[i] = (difference, verdict)
            elif reason != request.finish_reason:
                found[i] = (None, "fault")
        return found

    def outcomes(self) -> list[dict[str, Any]]:
        """For each prompt what became of it: its Generation, and what it cost to read."""
        return [
            {
                "name": label(i),
                **asdict(self.watch.engine.result(request)),
                "prompt_tokens": len(request.prompt_ids),
                "found_tokens": request.found_tokens,
                "read_tokens": sum(e.tokens for e in self.events if isinstance(e, Read) and e.request == i),
                "retractions": request.retractions,
            }
            for i, request in enumerate(self.requests)
        ]

    def summary(self, differences: dict[int, tuple[Difference | None, str]] | None) -> dict[str, Any]:
        """The whole run in numbers. differences: see above; None: nobody has looked."""
        stats, now = self.watch.engine.stats, self.watch.snapshot()
        admitted = [event for event in self.events if isinstance(event, Admitted)]
        read = [event for event in self.events if isinstance(event, Read)]
        reasons = Counter(str(request.finish_reason) for request in self.requests)
        arrivals = {event.request: event.step for event in self.events if isinstance(event, Arrived)}
        return {
            "requests": len(self.requests),
            "steps": now.step,
            "rounds": now.rounds,
            "tokens": sum(len(request.output_ids) for request in self.requests),
            "tokens_in_rounds": now.committed_tokens,
            "tokens_per_round": now.committed_tokens / now.rounds if now.rounds else 0.0,
            "accept_length": stats.accept_length,
            "finish_reasons": dict(reasons),
            "most_running": self.most_running,
            "waited_requests": sum(not event.again and event.step > arrivals[event.request] for event in admitted),
            "prompt_tokens": sum(len(request.prompt_ids) for request in self.requests),
            "prompt_tokens_found": sum(event.found_tokens for event in admitted if not event.again),
            "retractions": now.retractions,
            "retracted_requests": sum(request.retractions > 0 for request in self.requests),
            "tokens_found_again": sum(event.found_tokens for event in admitted if event.again),
            "tokens_read_again": sum(event.tokens for event in read if event.again),
            "evicted_tokens": now.evicted_tokens,
            "compared": differences is not None,
            "same_outputs": None if differences is None else len(self.requests) - len(differences),
            "differences": [
                {"prompt": i, "verdict": verdict, **(asdict(found) if found else {})}
                for i, (found, verdict) in (differences or {}).items()
            ],
            "ok": all(verdict == "rounding" for _, verdict in (differences or {}).values()),
        }


def closing_lines(summary: dict[str, Any], names: list[str], kv_slots: int) -> list[str]:
    """What was to be seen, in a few sentences."""
    many = summary["requests"]
    lines = [
        f"{plural(many, 'request')} shared {kv_slots} slots; {summary['most_running']} ran at one time, at most. "
        f"{summary['tokens_in_rounds']} of {plural(summary['tokens'], 'token')} came in "
        f"{plural(summary['rounds'], 'round')}"
        + (f", {summary['tokens_per_round']:.1f} in each" if summary["rounds"] else "")
        + (f", with accept length {summary['accept_length']:.2f}" if summary["accept_length"] else "")
        + "; the first of each output came with its prompt."
    ]
    if summary["retractions"]:
        who = "One was" if summary["retracted_requests"] == 1 else f"{summary['retracted_requests']} were"
        again, found = summary["tokens_read_again"], summary["tokens_found_again"]
        lines.append(
            f"{who} retracted, {_times(summary['retractions'])} in all: to go on where they stood, "
            f"{plural(again, 'token')} had to be read again, and {found} were still in the cache."
        )
    elif summary["waited_requests"]:
        waited = summary["waited_requests"]
        lines.append(f"Nobody was retracted: {waited} of {many} had to wait before they began, but none after that.")
    elif summary["finish_reasons"].get("out_of_slots"):
        lines.append("Nobody was retracted.")
    else:
        lines.append("Nobody was retracted: there was room for all.")
    found, prompts = summary["prompt_tokens_found"], summary["prompt_tokens"]
    if found:
        lines.append(
            f"Of {prompts} prompt tokens, {found} were in the prefix cache when they were needed, and not computed."
        )
    cut = summary["finish_reasons"].get("out_of_slots", 0)
    if cut:
        lines.append(f"{plural(cut, 'output')} ended where the whole pool was too small for it: raise --kv-slots.")
    if not summary["compared"]:
        return lines
    for row in summary["differences"]:
        name = names[row["prompt"]]
        if "index" not in row:
            lines.append(f"{name} ended for another reason than alone: that is a fault, please report it.")
            continue
        lines.append(
            f"{name} leaves the output that it gives alone at token {row['index']}, where the two best logits lie "
            f"{row['gap']:.1e} apart (limit {row['gap_limit']:.0e}): {VERDICTS[row['verdict']]}."
        )
    same = summary["same_outputs"]
    which = "All outputs are" if same == many else f"{same} of {many} outputs are"
    lines.append(f"{which}, token by token, what each prompt gives alone.")
    return lines


VERDICTS = {
    "rounding": "rounding can do that",
    "fault": "that is a fault, please report it",
    "unknown": "a token that was sampled, so this does not tell whether rounding can do that; --dtype float64 does",
}


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
