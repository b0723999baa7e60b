"""A model whose rows carry a state on from row to row: a chain is its path, a tree is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import assert_same_output, generate_watched, random_head
from pool_models import Ahead, llama

from refspec import Engine, SamplingParams, SpecConfig
from refspec.memory.kv_pool import KVLayout
from refspec.runtime.runner import lens_of

PROMPTS = [[3, 1, 4, 1, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [3, 1, 4, 2]]
PARAMS = SamplingParams(max_new_tokens=14)
CHAIN = {"topk": 1, "num_steps": 3, "num_draft_tokens": 4}


class Recurrent(torch.nn.Module):
    """h = a · h + embedding, and the next token is read from h.

    It scans the rows of a request in their order, whatever the mask says, as such models' kernels do. The state after
    each token is kept in the token's slot, so that a prefix can be shared and a rejected draft leaves nothing behind.
    """

    recurrent_state = True

    def __init__(self) -> None:
        super().__init__()
        base = llama()
        self.config, self.embed_tokens, self.lm_head = base.config, base.embed_tokens, base.lm_head
        self.decay = torch.linspace(0.5, 0.95, base.config.hidden_size).double()
        self.kv_layout = KVLayout(1, 1, base.config.hidden_size, torch.float64)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any, hidden_states: Any = None) -> Any:
        batch, states, start = attend.batch, torch.zeros(len(ids), self.config.hidden_size).double(), 0
        for r, rows in enumerate(batch.q_lens):
            tail = batch.tail_slots[r].tolist()
            committed = batch.req_to_token[batch.rows[r], : lens_of(batch)[r]].tolist()
            before = committed + tail[: tail.index(int(batch.out_slots[start]))]
            state = attend.pool.layers[0][before[-1], 0, 0] if before else states.new_zeros(states.shape[1])
            for row in range(start, start + rows):
                state = states[row] = self.decay * state + self.embed_tokens.weight[ids[row]]
            start += rows
        attend.pool.write(0, batch.out_slots, states[:, None], states[:, None])
        return states

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states)


MODEL = Recurrent()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"prefix_cache": True}, {"kv_slots": 40}, {"chunk_size": 2}], ids=str)
@pytest.mark.parametrize("algorithm", ["eagle", "eagle-v2"])
def test_one_branch_says_what_plain_decoding_says(page: int, settings: dict[str, Any], algorithm: str) -> None:
    """Also through prefix hits and retractions, with a draft that has a state, too."""
    plain = Engine(MODEL).generate(PROMPTS, PARAMS)
    engine = Engine(MODEL, Ahead(MODEL), SpecConfig(algorithm, **CHAIN, page_size=page), **settings)
    for _ in range(2):
        assert_same_output(plain, engine.generate(PROMPTS, PARAMS))
    engine.check()
    assert len({token for generation in plain for token in generation.token_ids}) > 5
    assert 1.2 < engine.stats.accept_length < 4
    assert bool(engine.stats.retractions) == ("kv_slots" in settings)
    assert bool(engine.stats.cached_tokens) == ("prefix_cache" in settings)


REFUSAL = "topk is 2, but the {role} keeps a recurrent state"


def test_more_branches_are_refused_for_a_target_and_for_a_draft() -> None:
    spec = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6)
    with pytest.raises(ValueError, match=REFUSAL.format(role="target") + r".*\btopk=1\b") as refused:
        Engine(MODEL, random_head(MODEL), spec)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=REFUSAL.format(role="draft")):
        Engine(llama(), Ahead(MODEL), spec)
    with pytest.raises(ValueError, match="algorithm is 'ngram', which guesses trees, but the target keeps"):
        Engine(MODEL, spec=SpecConfig("ngram", num_draft_tokens=6))  # type: ignore[arg-type]


def test_without_the_refusal_the_output_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree's rows are no path: the second child of a node would carry on from the first one."""
    monkeypatch.setattr(Recurrent, "recurrent_state", False)
    engine = Engine(MODEL, Ahead(MODEL), SpecConfig(topk=2, num_steps=3, num_draft_tokens=6))
    said, _ = generate_watched(engine, PROMPTS, PARAMS)
    plain = Engine(MODEL).generate(PROMPTS, PARAMS)
    assert [generation.token_ids for generation in said] != [generation.token_ids for generation in plain]
