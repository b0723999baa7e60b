"""What docs/algorithms.md says does not go together: each is refused in one line, or served with a note."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import random_logits

from refspec import Engine, SamplingParams, SpecConfig
from refspec.config import ALGORITHMS
from refspec.models.scripted import ScriptedModel
from refspec.workers.registry import BUILT_IN

VOCAB = 11
CHAIN = {"topk": 1, "num_steps": 3, "num_draft_tokens": 4}


def model() -> ScriptedModel:
    return ScriptedModel(random_logits(VOCAB), VOCAB)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"sampler": "rejection"}, "sampler is 'rejection', which judges a chain: it needs topk=1"),
        ({"sampler": "block"}, "sampler is 'block', which judges a chain: it needs topk=1"),
        ({**CHAIN, "num_draft_tokens": 3, "sampler": "block"}, "num_draft_tokens=num_steps[+]1, got .*=3"),
        ({**CHAIN, "sampler": "block", "threshold_acc": 0.9}, "threshold_acc is 0.9, .* only target_only has"),
        ({"adaptive_steps": (1, 3)}, r"adaptive_steps is .*, which needs topk=1, num_steps=3 and num_draft_tokens=4"),
        ({**CHAIN, "num_draft_tokens": 5}, "num_draft_tokens is 5, .* at most 4 with the root"),
        ({"algorithm": "ngram", "sampler": "rejection"}, "sampler is 'rejection', but algorithm ngram"),
        ({"algorithm": "ngram", "topk": 1}, "topk is 1, but algorithm ngram"),
        ({"algorithm": "ngram", "num_steps": 5}, "num_steps is 5, but algorithm ngram"),
    ],
)
def test_refused_by_the_config(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        SpecConfig(**fields)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fixed_fields_are_refused_by_the_engine(name: str) -> None:
    """Whatever an algorithm says it leaves no choice in. A config says what would do."""
    other = {"topk": 2, "num_steps": 2, "num_draft_tokens": 3, "exact_branch_kv": True, "sampler": "block"}
    fitting = BUILT_IN[name].spec()
    for field in set(BUILT_IN[name].fixed) & set(other):
        try:
            config = replace(fitting, **{field: other[field]})
        except ValueError:
            continue  # SpecConfig itself does not take it: see above
        with pytest.raises(
            ValueError, match=f"{field} is {other[field]!r}, but with algorithm {name} it must be"
        ) as no:
            Engine(spec=config)
        assert "SpecConfig(algorithm=" in str(no.value)
        assert "\n" not in str(no.value)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", ["eagle", "eagle-v2", "standalone"])
def test_a_chain_may_be_cut_with_a_note(name: str, n: int) -> None:
    """SGLang would check all of it, and warn."""
    params, target = SamplingParams(max_new_tokens=20), model()
    engine = Engine(target, target, SpecConfig(name, **{**CHAIN, "num_draft_tokens": n}))
    notes = (
        [f"num_draft_tokens is {n}, so that no more than {n - 1} of a chain's 3 tokens can be accepted"]
        if n < 4
        else []
    )
    assert [note.split(", and", 1)[0] for note in engine.notes] == notes
    assert engine.generate([[1, 2]], params) != []
    assert engine.stats.accept_length == pytest.approx(n, abs=0.5)  # draft and target agree, so all of it is accepted
    assert [output.token_ids for output in engine.generate([[1, 2]], params)] == [
        output.token_ids for output in Engine(target).generate([[1, 2]], params)
    ]


def test_exact_branches_of_a_chain_have_a_note() -> None:
    target = model()
    for topk, notes in ((1, 1), (2, 0)):
        spec = SpecConfig(topk=topk, num_steps=3, num_draft_tokens=4, exact_branch_kv=True)
        found = Engine(target, target, spec).notes
        assert [note.partition(" changes nothing")[0] for note in found] == ["exact_branch_kv"] * notes


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not BUILT_IN[name].adaptive])
def test_steps_that_change_are_refused_where_they_cannot(name: str) -> None:
    """SGLang would go on with steps that stay, and warn."""
    if name == "ngram":
        with pytest.raises(ValueError, match="topk is 1, but algorithm ngram"):
            SpecConfig(name, **CHAIN, adaptive_steps=(1, 3))  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=f"adaptive_steps is .*, but algorithm {name} takes the same number of steps"):
        Engine(spec=SpecConfig(name, **CHAIN, adaptive_steps=(1, 3)))  # type: ignore[arg-type]


def test_a_draft_for_whoever_takes_none() -> None:
    target = model()
    with pytest.raises(ValueError, match="a draft model is given, but algorithm ngram needs none: leave it out"):
        Engine(target, target, SpecConfig("ngram"))
