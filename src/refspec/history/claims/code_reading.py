"""Checks of what was read in the code."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from refspec.history import catalogue
from refspec.history.claims.checking import Part, check
from refspec.history.claims.evidence import (
    Change,
    Defined,
    NotThereError,
    changes,
    commit,
    definition,
    definitions,
)
from refspec.history.claims.syntax import calls, name_of
from refspec.history.claims.wording import committed, figures, listed
from refspec.history.clone import Clone

POSITIONS_OFF, POSITIONS_RIGHT = "013021b6a1", "48fc26a814"  # #3269, #25015


@check("P1")
def one_position_too_far(clone: Clone) -> Sequence[Part]:
    """The draft loop ran one position too far for 15 months without any wrong output."""
    first, last = commit(clone, POSITIONS_OFF), commit(clone, POSITIONS_RIGHT)
    since, until = committed(first), committed(last)
    months = (int(until[:4]) - int(since[:4])) * 12 + int(until[5:7]) - int(since[5:7])
    path = "eagle_worker.py"
    order = {
        revision: _advance_and_forward(clone, revision, path)
        for revision in (POSITIONS_OFF, "v0.4.6", "v0.5.0rc0", f"{POSITIONS_RIGHT}^", POSITIONS_RIGHT)
    }
    early = {revision: advance < forward for revision, (advance, forward) in order.items()}
    decided = definition(clone, POSITIONS_OFF, "eagle_utils.py", "EagleVerifyInput.verify")
    put_out, predicted = (_assigned(decided, name) for name in ("verified_id", "predict"))
    mended = [f"{one.path.rpartition('/')[2]} {figures(one)}" for one in changes(clone, POSITIONS_RIGHT) if one.path]
    drafts_only = all(_lies_in_drafting(clone, one) for one in changes(clone, POSITIONS_RIGHT))
    return [
        Part(
            "the draft's positions were advanced before its forward",
            all(early[revision] for revision in order if revision != POSITIONS_RIGHT) and not early[POSITIONS_RIGHT],
            f"{path}: draft_forward advances them and then runs the model at "
            + listed([f"{revision} (L{a}, L{b})" for revision, (a, b) in order.items() if early[revision]])
            + "; the other way round at "
            + listed([f"{revision} (L{b}, L{a})" for revision, (a, b) in order.items() if not early[revision]]),
            command=f"git show {POSITIONS_RIGHT}",
        ),
        Part(
            "that was so for 15 months", months == 15, f"from {since} ({POSITIONS_OFF}) to {until} ({POSITIONS_RIGHT})"
        ),
        Part(
            "verification put out what the target predicts, whatever was drafted (read where it began: all requests "
            "were greedy then)",
            put_out == ["predict[accept_index]"] and "logits_output.next_token_logits" in predicted[0],
            f"eagle_utils.py @ {POSITIONS_OFF} L{decided.first}: verified_id is {put_out[0]}, and predict "
            f"{predicted[0]}",
        ),
        Part(
            "what mended it touches drafting alone",
            drafts_only,
            f"{POSITIONS_RIGHT}: {listed(mended)}, " + ("all in drafting" if drafts_only else "not in drafting alone"),
        ),
    ]


def _assigned(found: Defined, name: str) -> list[str]:
    """What a name is set to, the first time first. Raises NotThereError if it never is."""
    set_to = [
        ast.unparse(node.value)
        for node in ast.walk(found.node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    if not set_to:
        raise NotThereError(f"{found.name} sets no {name}")
    return set_to


def _advance_and_forward(clone: Clone, revision: str, path: str) -> tuple[int, int]:
    """The lines, in the loop of draft_forward, that advance the positions and that run the model."""
    name = "EAGLEWorker.draft_forward"
    found = definition(clone, revision, path, name)
    for loop in ast.walk(found.node):
        if isinstance(loop, ast.For):
            ran = {name_of(call).rpartition("self.")[2]: call.lineno for call in calls(loop)}
            advance = [line for called, line in ran.items() if called.endswith("positions.add_")]
            forward = [line for called, line in ran.items() if called.endswith(".forward")]
            if advance and forward:
                return advance[0], forward[0]
    raise NotThereError(f"{name} of {path} at {revision} has no loop that advances positions and runs the model")


def _lies_in_drafting(clone: Clone, one: Change) -> bool:
    """Does a change lie in functions that draft: draft_forward, or the runner of the draft's CUDA graphs?"""
    path = one.path.removeprefix(f"{catalogue.DIRECTORY}/")
    if path.startswith("eagle_draft_"):
        return True
    drafting = [
        found for name, found in definitions(clone, POSITIONS_RIGHT, path).items() if name.endswith(".draft_forward")
    ]
    return all(any(found.first <= number <= found.last for found in drafting) for number, _ in one.added)
