"""A frozen-KV assistant without weights: it reads the text in a scripted target's records, and its drafts out of the
hidden state that it is fed.

As with ScriptedModel, what the engine mixes up, the script is asked about: records of other slots, a position that is
not that of the newest cached token, a hidden state of another branch, or of another token than the newest cached one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from refspec.memory.kv_pool import KVLayout
from refspec.models.scripted import NO_HIDDEN_INPUT, ScriptedConfig

MOST_DRAFTS = 8


class ScriptedAssistant:
    """next_logits(context) -> vocab_size numbers, as of ScriptedModel. Usable under a ScriptedModel only.

    A hidden state of its own is (id, answer, how many ids it carries, these ids): the bonus and the drafts before.
    """

    def __init__(self, next_logits: Callable[[list[int]], Sequence[float]], vocab_size: int) -> None:
        self.next_logits = next_logits
        self.config = ScriptedConfig(vocab_size, 4096, ())
        self.kv_layout = KVLayout(num_layers=1, kv_heads=1, head_dim=3, dtype=torch.float64)

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Any, hidden_states: Tensor) -> Tensor:
        records, _ = attend.pool.read(0, attend.columns)  # (b, 1, columns, 3): read only
        b, rows = attend.padding.batch_size, attend.padding.rows
        assert len(input_ids) == b * rows
        visible = attend.visible
        out = []
        for row, token in enumerate(input_ids.tolist()):
            request = row // rows
            seen = records[request, 0] if visible is None else records[request, 0][visible[request, row % rows]]
            fed = hidden_states[row].tolist()
            carried = []
            if len(fed) > self.config.hidden_size:
                first = self.config.hidden_size + 1
                carried = [int(x) for x in fed[first : first + int(fed[first - 1])]]
            ids = [*carried, token]
            answer = self._answer(sorted(seen.tolist(), key=lambda r: r[2]), int(fed[0]), ids, int(positions[row]))
            out.append([token, *answer, len(ids), *ids, *[0] * (MOST_DRAFTS - len(ids))])
        return torch.tensor(out, dtype=torch.float64)

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, 1 : self.config.hidden_size]

    def _answer(self, seen: list[list[float]], fed_id: int, ids: list[int], position: int) -> list[float]:
        cached = [int(token) for _, token, _ in seen]
        logits = [float(x) for x in self.next_logits([*cached, *ids])]
        right = [[NO_HIDDEN_INPUT, token, p] for p, token in enumerate(cached)]
        if seen == right and position == len(cached) - 1 and fed_id == [*cached, *ids][-2]:
            return logits
        worst = min(range(len(logits)), key=logits.__getitem__)
        return [1.0 if token == worst else 0.0 for token in range(len(logits))]
