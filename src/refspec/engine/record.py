"""A run of the engine as a trace: what the terminal, the notebooks and the site show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from refspec.engine.engine import Engine, Generation
from refspec.trace import Output, Round, Trace


def make_trace(
    engine: Engine,
    config: dict[str, Any],
    prompts: Sequence[str | Sequence[int]],
    generations: Sequence[Generation],
    rounds: list[Round],
) -> Trace:
    """The run as data, with the text of every token id in it (the id itself where the model has no tokenizer).

    generations, rounds: what `engine.generate(prompts, ...)` returned, and what it told its observer.
    """
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
            name: _setting(value)
            for name, value in config.items()
            if name != "prompts"  # their tokens are in the outputs
        },
        vocabulary={token: _token_text(engine, token) for token in sorted(ids)},
        rounds=rounds,
        outputs=outputs,
    )


def _setting(value: Any) -> Any:
    """As one plain value: a trace's settings are a flat table."""
    if isinstance(value, dict):
        return json.dumps(value)
    return " ".join(map(repr, value)) if isinstance(value, list | tuple) else value


def _token_text(engine: Engine, token: int) -> str:
    """Decoded behind itself: some tokenizers drop the space before the first word of a text."""
    if engine.tokenizer is None:
        return str(token)
    once, twice = (engine.tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice[len(once) :]
