"""Would the tests of output and of draft quality see a fault? Each fault here is put in on purpose, and must show.

Verification repairs a wrong draft, so a fault of the draft shows in the number of accepted tokens alone; a fault of
the target's side shows in the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders import peaked_logits, ragged_prompts, transparent_pair

import refspec.spec.commit
import refspec.spec.draft
import refspec.spec.tree
import refspec.spec.verify
import refspec.workers.eagle_v1 as eagle_v1
from refspec import Engine, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch, ForwardOutput
from refspec.models.scripted import ScriptedModel
from refspec.runtime.runner import ModelRunner

VOCAB = 23
CHAIN = SpecConfig(topk=1, num_steps=4, num_draft_tokens=5)
TREE = SpecConfig(topk=3, num_steps=4, num_draft_tokens=20, exact_branch_kv=True)
PARAMS = SamplingParams(max_new_tokens=24)

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def change_forwards(patch: Patch, where: str, change: Callable[[ForwardBatch], ForwardBatch]) -> None:
    """Every forward of that phase gets a batch that was tampered with."""
    original = ModelRunner.forward

    def forward(
        self: ModelRunner, batch: ForwardBatch, phase: str, logits_rows: torch.Tensor | None = None
    ) -> ForwardOutput:
        tampered = change(batch) if phase == where and batch.q_lens else batch
        return original(self, tampered, phase, logits_rows)

    patch.setattr(ModelRunner, "forward", forward)


# --- faults of the draft ------------------------------------------------------------------------------------------


def draft_positions_one_ahead(patch: Patch) -> None:
    """SGLang's fault of fifteen months."""
    change_forwards(patch, "draft", lambda batch: replace(batch, positions=batch.positions + 1))


def draft_positions_that_stand_still(patch: Patch) -> None:
    first: list[torch.Tensor] = []

    def change(batch: ForwardBatch) -> ForwardBatch:
        if batch.tail_slots.shape[1] == batch.q_lens[0]:  # the first step of a loop
            first[:] = [batch.positions]
        return replace(batch, positions=first[0])

    change_forwards(patch, "draft", change)


def extend_positions_one_ahead(patch: Patch) -> None:
    change_forwards(patch, "extend", lambda batch: replace(batch, positions=batch.positions + 1))


def prefill_positions_from_one(patch: Patch) -> None:
    change_forwards(patch, "prefill_draft", lambda batch: replace(batch, positions=batch.positions + 1))


def extend_on_the_hidden_state_of_the_last_drafted(patch: Patch) -> None:
    """Instead of the last accepted one."""
    original = eagle_v1.extend_after_verify

    def extend(batch, verified, done, *others):  # type: ignore[no-untyped-def]
        hidden = verified.hidden_states.clone()
        nodes = len(hidden) // len(batch)
        for r, rows in enumerate(done.kept_rows):
            hidden[rows[-1]] = verified.hidden_states[(r + 1) * nodes - 1]
        return original(batch, replace(verified, hidden_states=hidden), done, *others)

    patch.setattr(eagle_v1, "extend_after_verify", extend)


def extend_on_hidden_states_of_the_token_before(patch: Patch) -> None:
    change_forwards(patch, "extend", lambda batch: replace(batch, hidden_states=batch.hidden_states.roll(1, 0)))


def prefill_on_hidden_states_of_the_token_before(patch: Patch) -> None:
    change_forwards(patch, "prefill_draft", lambda batch: replace(batch, hidden_states=batch.hidden_states.roll(1, 0)))


def draft_on_hidden_states_of_another_branch(patch: Patch) -> None:
    """Each row is fed the hidden state of its own column, not of its parent."""
    original = refspec.spec.draft.select_top_k_tokens

    def select(i, topk_p, topk_index, hidden_states, scores, topk):  # type: ignore[no-untyped-def]
        input_ids, chosen_hidden, scores, level = original(i, topk_p, topk_index, hidden_states, scores, topk)
        return input_ids, (hidden_states.roll(1, 0) if i else chosen_hidden), scores, level

    patch.setattr(refspec.spec.draft, "select_top_k_tokens", select)


def draft_mask_without_an_ancestor(patch: Patch) -> None:
    """From the second step on, nobody sees the first."""

    def change(batch: ForwardBatch) -> ForwardBatch:
        width = batch.tail_slots.shape[1]
        k = batch.q_lens[0]
        mask = (
            torch.ones(len(batch.q_lens), k, width, dtype=torch.bool)
            if batch.tail_mask is None
            else batch.tail_mask.clone()
        )
        if width > k:
            mask[:, :, :k] = False
        return replace(batch, tail_mask=mask)

    change_forwards(patch, "draft", change)


def draft_slots_swapped(patch: Patch) -> None:
    """The rows of two requests write into each other's slots."""
    change_forwards(patch, "draft", lambda batch: replace(batch, out_slots=batch.out_slots.roll(batch.q_lens[0])))


def extend_slots_swapped(patch: Patch) -> None:
    change_forwards(patch, "extend", lambda batch: replace(batch, out_slots=batch.out_slots.roll(batch.q_lens[0])))


def extend_reads_one_token_of_the_prefix_less(patch: Patch) -> None:
    change_forwards(patch, "extend", lambda batch: replace(batch, prefix_lens=[n - 1 for n in batch.prefix_lens]))


def extend_starts_from_the_first_new_row(patch: Patch) -> None:
    """The next round's guesses are read from the first accepted row, not from the last."""
    original = ModelRunner.forward

    def forward(self, batch, phase, logits_rows=None):  # type: ignore[no-untyped-def]
        if phase == "extend" and batch.q_lens:
            starts = torch.tensor(batch.q_lens).cumsum(0) - torch.tensor(batch.q_lens)
            return original(self, batch, phase, starts)
        return original(self, batch, phase, logits_rows)

    patch.setattr(ModelRunner, "forward", forward)


DRAFT_FAULTS: list[Mutation] = [
    draft_positions_one_ahead,
    draft_positions_that_stand_still,
    extend_positions_one_ahead,
    prefill_positions_from_one,
    extend_on_the_hidden_state_of_the_last_drafted,
    extend_on_hidden_states_of_the_token_before,
    prefill_on_hidden_states_of_the_token_before,
    draft_on_hidden_states_of_another_branch,
    draft_mask_without_an_ancestor,
    draft_slots_swapped,
    extend_slots_swapped,
    extend_reads_one_token_of_the_prefix_less,
    extend_starts_from_the_first_new_row,
]

# --- faults of the target's side ----------------------------------------------------------------------------------


def change_tree(patch: Patch, change: Callable[[list[torch.Tensor]], None]) -> None:
    """Tamper, in place, with what build_tree returns: mask, positions, three links."""
    original = refspec.spec.tree.build_tree

    def build_tree(*args, **keywords):  # type: ignore[no-untyped-def]
        tree = list(original(*args, **keywords))
        change(tree)
        return tuple(tree)

    patch.setattr(refspec.spec.tree, "build_tree", build_tree)


def verify_mask_without_an_ancestor(patch: Patch) -> None:
    """No node but the root's children sees the first of them."""

    def change(tree: list[torch.Tensor]) -> None:
        b, n = tree[2].shape
        tree[0].view(b, n, n)[:, 2:, 1] = False

    change_tree(patch, change)


def verify_mask_that_shows_a_cousin(patch: Patch) -> None:
    def change(tree: list[torch.Tensor]) -> None:
        b, n = tree[2].shape
        tree[0].view(b, n, n)[:, :, n - 1] = True

    change_tree(patch, change)


def verify_positions_by_column(patch: Patch) -> None:
    """Positions count through the tree instead of down it."""

    def change(tree: list[torch.Tensor]) -> None:
        b, n = tree[2].shape
        roots = tree[1].view(b, n)[:, :1]
        tree[1].copy_((roots + torch.arange(n)).flatten())

    change_tree(patch, change)


def verify_links_skip_a_node(patch: Patch) -> None:
    def change(tree: list[torch.Tensor]) -> None:
        tree[3][:, 0] = tree[4][:, 1]  # the root's first child becomes its second

    change_tree(patch, change)


def verify_slots_swapped(patch: Patch) -> None:
    """Each node's keys and values go to its neighbour's slot."""
    change_forwards(patch, "target", lambda batch: replace(batch, out_slots=batch.out_slots.roll(1)))


def verify_reads_one_token_of_the_prefix_less(patch: Patch) -> None:
    change_forwards(patch, "target", lambda batch: replace(batch, prefix_lens=[n - 1 for n in batch.prefix_lens]))


def commit_enters_slots_of_another_request(patch: Patch) -> None:
    original = refspec.spec.commit.assign_req_to_token

    def assign(table, rows, start, end, slots):  # type: ignore[no-untyped-def]
        original(table, rows, start, end, slots.roll(1))

    patch.setattr(refspec.spec.commit, "assign_req_to_token", assign)


def verify_compares_a_draft_with_its_own_row(patch: Patch) -> None:
    """The choice *at* a node is compared with the node, not the choice at its parent."""
    original = refspec.spec.verify.verify_tree_greedy

    def walk(candidates, index, child, sibling, target_predict, steps):  # type: ignore[no-untyped-def]
        return original(candidates, index, child, sibling, target_predict.roll(-1, 1), steps)

    patch.setattr(refspec.spec.verify, "verify_tree_greedy", walk)


TARGET_FAULTS: list[Mutation] = [
    verify_mask_without_an_ancestor,
    verify_mask_that_shows_a_cousin,
    verify_positions_by_column,
    verify_links_skip_a_node,
    verify_slots_swapped,
    verify_reads_one_token_of_the_prefix_less,
    commit_enters_slots_of_another_request,
    verify_compares_a_draft_with_its_own_row,
]

# --- what shows ---------------------------------------------------------------------------------------------------


def what_shows(engine: Engine, plain: Engine, prompts: list[list[int]]) -> set[str]:
    """What the output test and the draft-quality test would complain of."""
    assert engine.spec is not None
    complaints, longest = set(), engine.spec.num_steps + 1

    def observer(round_) -> None:  # type: ignore[no-untyped-def]
        if any(len(request.accepted_rows) < longest for request in round_.requests):
            complaints.add("draft quality")

    if [g.token_ids for g in engine.generate(prompts, PARAMS, observer)] != [
        g.token_ids for g in plain.generate(prompts, PARAMS)
    ]:
        complaints.add("output")
    return complaints


def scripted(spec: SpecConfig) -> set[str]:
    model = ScriptedModel(peaked_logits(VOCAB), VOCAB)
    return what_shows(Engine(model, model, spec), Engine(model), ragged_prompts(3, 8, VOCAB))


def llama(spec: SpecConfig) -> set[str]:
    target, head = transparent_pair(vocab_size=VOCAB)
    return what_shows(Engine(target, head, spec), Engine(target), [[0, 5, 11], [0, 3, 9, 4, 2, 7], [0, 7]])


@pytest.mark.parametrize("models", [scripted, llama])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_nothing_shows_without_a_fault(models: Callable[[SpecConfig], set[str]], spec: SpecConfig) -> None:
    assert models(spec) == set()


@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_fault_of_the_draft_costs_accepted_tokens_and_nothing_else(fault: Mutation, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert scripted(TREE) == {"draft quality"}


@pytest.mark.parametrize("fault", TARGET_FAULTS)
def test_fault_of_the_verification_shows(fault: Mutation, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    if fault is verify_links_skip_a_node:  # no tree has such links, and the walk refuses them
        with pytest.raises(ValueError, match="twice to the same column"):
            scripted(TREE)
    else:
        assert scripted(TREE)


@pytest.mark.parametrize(
    "fault",
    [
        draft_positions_one_ahead,
        draft_positions_that_stand_still,
        extend_positions_one_ahead,
        draft_mask_without_an_ancestor,
        draft_slots_swapped,
        extend_slots_swapped,
        verify_mask_without_an_ancestor,
        verify_mask_that_shows_a_cousin,
        verify_positions_by_column,
        verify_slots_swapped,
        commit_enters_slots_of_another_request,
    ],
)
def test_fault_shows_over_real_attention_too(fault: Mutation, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert llama(TREE)
