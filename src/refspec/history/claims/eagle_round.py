"""A round of SGLang's first EAGLE worker, followed through its source: what checks of claims on it share."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from refspec.history.claims.evidence import Defined, full_path
from refspec.history.claims.walk import Call, Walk, walk, written
from refspec.history.clone import HistoryError

RELEASE = "v0.4.6"  # the release that the study notes describe
WORKER = "eagle_worker.py"
TREES = "eagle_utils.py"
SCHEDULER = "/python/sglang/srt/managers/scheduler.py"
SERVER = "/python/sglang/srt/server_args.py"

FIRST_WORKER = "815dce0554"
ONE_FORWARD_LESS = "d23cb9a01e"
PAGES = "b26bc86b36"

ROUND = "EAGLEWorker.forward_batch_speculative_generation"
ROUND_SINCE_OVERLAP = "EAGLEWorker.forward_batch_generation"
MODES = ("decode", "idle", "extend")
TARGET = "target_worker.forward_batch_generation"


def settings_of(mode: str, steps: int = 3, topk: int = 4, page: int = 1) -> dict[str, Any]:
    """What is known as a round begins. Under which name the worker knows a setting depends on the revision."""
    known: dict[str, Any] = {"batch.batch_size()": 1, "batch.is_extend_in_batch": False, "self.page_size": page}
    known |= {f"batch.forward_mode.is_{one}()": one == mode for one in MODES}
    for holder in ("self", "self.server_args"):
        known[f"{holder}.speculative_num_steps"] = steps
        known[f"{holder}.{'topk' if holder == 'self' else 'speculative_eagle_topk'}"] = topk
    return known


def follow_round(known: Mapping[str, Defined], settings: Mapping[str, Any]) -> Walk:
    """A round of the worker's, under whichever of its two names it has."""
    return walk(known, ROUND_SINCE_OVERLAP if ROUND_SINCE_OVERLAP in known else ROUND, settings)


def is_draft(call: Call) -> bool:
    """A forward of the worker's own model, which is the draft (E12)."""
    return call.name.endswith(".forward") and "model_runner" in call.name and "target" not in call.name


def draft_forwards_of(way: Walk) -> list[Call]:
    """The forwards of the draft on it, in their order."""
    return [call for call in way.calls if is_draft(call)]


def models_run(way: Walk) -> tuple[int, int]:
    """How often the target and the draft run. Raises HistoryError if one of them does so who knows how often."""
    target, draft = way.named(TARGET), draft_forwards_of(way)
    repeated = {id(call) for call in way.repeated}
    if any(id(call) in repeated for call in (*target, *draft)):
        raise HistoryError(
            "how often a model runs cannot be read off the source: it does so in a loop over what is unknown"
        )
    return len(target), len(draft)


def made_before(way: Walk, calls: Sequence[Call], later: str) -> list[Call]:
    """Those of the calls that come before any of that name."""
    end = min(way.at(later), default=len(way.calls))
    early = {id(call) for call in way.calls[:end]}
    return [call for call in calls if id(call) in early]


def calls_of(node: ast.AST, name: str) -> list[ast.Call]:
    """The calls in the code of what is written so, in no particular order."""
    return [one for one in ast.walk(node) if isinstance(one, ast.Call) and written(one.func) == name]


def assignments(node: ast.AST) -> list[tuple[str, str]]:
    """What is assigned to what, as written, in the file's order."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Assign)]
    found.sort(key=lambda one: one.lineno)
    return [(written(target), written(one.value)) for one in found for target in one.targets]


def shows(revision: str, path: str, *found: Defined) -> str:
    """A command that shows a reader these definitions."""
    lines = "".join(f"{one.first},{one.last}p;" for one in found).rstrip(";")
    return f"git show {revision}:{full_path(path)} | sed -n '{lines}'"
