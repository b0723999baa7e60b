"""A run of the engine as a trace, and the trace as a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refspec.trace import Output, Round, Trace

if TYPE_CHECKING:
    from refspec.engine.engine import Engine, Generation


def make_trace(
    engine: Engine,
    config: dict[str, Any],
    prompts: Sequence[str],
    generations: Sequence[Generation],
    rounds: list[Round],
) -> Trace:
    """The run as data, with the text of every token id in it."""
    outputs = [
        Output(
            prompt_ids=engine.encode(prompt),
            token_ids=done.token_ids,
            finish_reason=done.finish_reason,
            accept_lens=done.accept_lens,
        )
        for prompt, done in zip(prompts, generations, strict=True)
    ]
    ids = {token for output in outputs for token in output.prompt_ids + output.token_ids}
    for round_ in rounds:
        for tree in round_.requests:
            ids.update([tree.bonus_token, *tree.target_predict, *tree.committed])
            ids.update(candidate.token for candidate in tree.candidates)
    return Trace(
        config={
            name: " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            for name, value in config.items()
            if name != "prompts"  # their tokens are in the outputs
        },
        vocabulary={token: _token_text(engine, token) for token in sorted(ids)},
        rounds=rounds,
        outputs=outputs,
    )


@contextmanager
def trace_writer(file: Path | None) -> Iterator[Callable[[Trace], None]]:
    """A function that writes a trace to the file. What was in the file stays there until a whole trace is written.

    Raises ValueError at once, not after a long run, if the file cannot be written.
    """
    if file is None:
        yield lambda trace: None
        return
    final = file.resolve()
    if final.is_dir():
        raise ValueError(f"cannot write the trace {file}: it is a folder")
    in_place = final.exists() and not final.is_file()  # a pipe or a device must not be replaced
    beside = final if in_place else final.with_name(f".{final.name}.{os.getpid()}")

    def save(trace: Trace) -> None:
        with _write_errors(file):
            trace.save(beside)
            if not in_place:
                if final.exists():
                    shutil.copymode(final, beside)
                beside.replace(final)

    if not in_place:
        with _write_errors(file):
            beside.open("x").close()
            beside.unlink()
    try:
        yield save
    finally:
        if not in_place:
            beside.unlink(missing_ok=True)


@contextmanager
def _write_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write the trace {file}: {error.strerror}") from None


def _token_text(engine: Engine, token: int) -> str:
    """Decoded behind itself: some tokenizers drop the space before the first word of a text."""
    assert engine.tokenizer is not None
    once, twice = (engine.tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice[len(once) :]
