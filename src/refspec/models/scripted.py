"""A model without weights, whose every word can be foretold, and which says a wrong one at any bookkeeping error.

A real model's cache holds keys and values, and a mix-up of slots, mask or positions only makes its text a little
worse. The scripted model keeps, in the same slots, a record for each row: (id that the row's hidden input stands
for, the row's own id, its position). For its answer it reads the records back through the slots and the mask that
it was given, lines the ids up by position, and asks a function of yours what comes after them. What the engine
mixed up, the function is asked about.

As a target it is fed no hidden states. As an EAGLE-style draft its rows are one token ahead: row p holds token
p + 1, and the hidden input of row 0 stands for token 0, so the draft too sees the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from refspec.memory.kv_pool import KVLayout

NO_HIDDEN_INPUT = -1


class Attention(Protocol):
    """The part of runtime.runner.PoolAttention that is used here."""

    def look_up(self, records: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class ScriptedConfig:
    """What the engine reads of a model's configuration."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @property
    def hidden_size(self) -> int:
        return 1 + self.vocab_size  # the row's own id, then its answer


class ScriptedModel:
    """next_logits(context) -> vocab_size numbers: how likely each id is after the ids of `context`.

    Usable as target and as draft, also the same object as both; prompts are lists of ids.

    A row whose records do not line up (a position missing, taken twice, or not the row's own at the end; a hidden
    input that stands for another token than the one before) answers with the id that next_logits holds least
    likely, so that the error shows as a wrong word.
    """

    def __init__(
        self,
        next_logits: Callable[[list[int]], Sequence[float]],
        vocab_size: int,
        max_context: int = 4096,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.next_logits = next_logits
        self.config = ScriptedConfig(vocab_size, max_context, tuple(eos_token_ids))
        # float64 holds every id and position exactly; keys and values alike are the record.
        self.kv_layout = KVLayout(num_layers=1, kv_heads=1, head_dim=3, dtype=torch.float64)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attend: Attention, hidden_states: Tensor | None = None
    ) -> Tensor:
        """input_ids, positions i64 (n); hidden_states f64 (n, hidden_size) or None. Returns f64 (n, hidden_size)."""
        before = torch.full_like(input_ids, NO_HIDDEN_INPUT) if hidden_states is None else hidden_states[:, 0]
        records = torch.stack([before.double(), input_ids.double(), positions.double()], dim=1)
        rows = zip(input_ids.tolist(), positions.tolist(), attend.look_up(records), strict=True)
        hidden = [[float(token), *self._answer(seen, position)] for token, position, seen in rows]
        return torch.tensor(hidden, dtype=torch.float64, device=input_ids.device)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """f64 (n, hidden_size) -> f64 (n, vocab_size)."""
        return hidden_states[:, 1:]

    def _answer(self, seen: Tensor, position: int) -> list[float]:
        """What comes after the ids of the records (before, id, position), in the order of their positions."""
        fed, ids, places = (list(map(int, column)) for column in seen.T.tolist())
        if places != sorted(places):
            records = sorted(zip(fed, ids, places, strict=True), key=lambda record: record[2])
            fed, ids, places = map(list, zip(*records, strict=True))
        context = ids if fed[0] == NO_HIDDEN_INPUT else [fed[0], *ids]
        logits = list(map(float, self.next_logits(context)))
        if len(logits) != self.config.vocab_size:
            raise ValueError(f"next_logits gave {len(logits)} numbers for a vocabulary of {self.config.vocab_size}")
        expected = [NO_HIDDEN_INPUT] * len(ids) if fed[0] == NO_HIDDEN_INPUT else context[:-1]
        if fed == expected and places == list(range(position + 1)):
            return logits
        wrong = min(range(len(logits)), key=logits.__getitem__)
        return [1.0 if token == wrong else 0.0 for token in range(len(logits))]
