"""The scripted model: every word can be foretold, and every bookkeeping error gives a wrong one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from refspec.models.scripted import ScriptedModel

Record = tuple[int, int, int]  # (id that the hidden input stands for, own id, position)


class Seen:
    """In place of the attention: what each row sees, whatever it keeps."""

    def __init__(self, *rows: Sequence[Record]) -> None:
        self.rows = rows
        self.kept: list[Sequence[float]] = []

    def look_up(self, records: torch.Tensor) -> list[torch.Tensor]:
        self.kept = records.tolist()
        return [torch.tensor(row, dtype=torch.float64).view(-1, 3) for row in self.rows]


def model_that_notes(contexts: list[list[int]]) -> ScriptedModel:
    """Says 3, whatever it is asked, and least likely of all 0."""

    def next_logits(context: list[int]) -> list[float]:
        contexts.append(context)
        return [0, 1, 2, 9, 1]

    return ScriptedModel(next_logits, 5)


def ask(seen: Seen, token: int, position: int, before: int | None = None) -> tuple[list[list[int]], list[float]]:
    """Which contexts were asked about, and the logits of the one row."""
    contexts: list[list[int]] = []
    model = model_that_notes(contexts)
    hidden = None
    if before is not None:
        hidden = torch.zeros(1, model.config.hidden_size, dtype=torch.float64)
        hidden[0, 0] = before
    out = model(torch.tensor([token]), torch.tensor([position]), seen, hidden)
    assert out[0, 0] == token
    return contexts, model.logits(out)[0].tolist()


def test_target_is_asked_about_the_ids_in_the_order_of_their_positions() -> None:
    contexts, logits = ask(Seen([(-1, 4, 2), (-1, 2, 0), (-1, 1, 1)]), token=4, position=2)
    assert contexts == [[2, 1, 4]]
    assert logits == [0, 1, 2, 9, 1]


def test_draft_is_one_token_ahead_and_knows_the_first_one_from_its_hidden_input() -> None:
    contexts, logits = ask(Seen([(2, 1, 0), (1, 4, 1)]), token=4, position=1, before=1)
    assert contexts == [[2, 1, 4]]
    assert logits[3] == 9


def test_row_keeps_what_it_was_fed() -> None:
    seen = Seen([(2, 4, 0)])
    ask(seen, token=4, position=0, before=2)
    assert seen.kept == [[2, 4, 0]]
    seen = Seen([(-1, 4, 0)])
    ask(seen, token=4, position=0)
    assert seen.kept == [[-1, 4, 0]]


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([(-1, 2, 0), (-1, 4, 2)], "position 1 is missing"),
        ([(-1, 1, 1), (-1, 4, 2)], "position 0 is missing"),
        ([(-1, 2, 0), (-1, 1, 1), (-1, 1, 1), (-1, 4, 2)], "position 1 comes twice"),
        ([(-1, 2, 0), (-1, 1, 1)], "the row does not see itself"),
        ([(-1, 2, 0), (-1, 1, 1), (-1, 4, 2), (-1, 4, 3)], "a later position is seen"),
        ([(-1, 2, 0), (-1, 1, 1), (-1, 4, 3)], "the row sits elsewhere than it says"),
        ([(1, 2, 0), (-1, 1, 1), (-1, 4, 2)], "a record of the draft's"),
    ],
)
def test_target_whose_records_do_not_line_up_says_the_least_likely(records: list[Record], fault: str) -> None:
    _, logits = ask(Seen(records), token=4, position=2)
    assert logits.index(max(logits)) == 0, fault


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([(3, 1, 1), (1, 4, 2)], "position 0 is missing"),
        ([(2, 1, 0), (1, 4, 1), (4, 4, 2), (4, 4, 2)], "position 2 comes twice"),
        ([(2, 1, 0), (1, 3, 1), (1, 4, 2)], "the hidden state of the token before the one before"),
        ([(2, 1, 0), (1, 3, 1), (4, 4, 2)], "the row's own hidden state"),
        ([(2, 1, 0), (3, 3, 1), (3, 4, 2)], "a wrong hidden state further back"),
        ([(2, 1, 0), (-1, 3, 1), (3, 4, 2)], "a record of the target's"),
    ],
)
def test_draft_whose_records_do_not_line_up_says_the_least_likely(records: list[Record], fault: str) -> None:
    """Each row's hidden input must stand for the id of the row before it: that is what makes EAGLE's rows a text."""
    _, logits = ask(Seen(records), token=4, position=2, before=3)
    assert logits.index(max(logits)) == 0, fault


@pytest.mark.parametrize("count", [0, 4, 6])
def test_script_that_gives_another_number_of_logits_is_refused(count: int) -> None:
    model = ScriptedModel(lambda context: [0.0] * count, 5)
    with pytest.raises(ValueError, match=f"next_logits gave {count} numbers for a vocabulary of 5"):
        model(torch.tensor([1]), torch.tensor([0]), Seen([(-1, 1, 0)]))


def test_config_says_what_an_engine_wants_to_know() -> None:
    model = ScriptedModel(lambda context: [0.0] * 5, 5, max_context=99, eos_token_ids=[3, 4])
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_ids) == (5, 99, (3, 4))
    assert config.hidden_size == 6
