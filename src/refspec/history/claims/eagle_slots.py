"""The checks of the study notes on EAGLE, where they speak of the cache: which slots a round takes and gives back.

A round is not run but followed through its source (see `walk`), with settings of ours.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from refspec.history.claims.checking import Part, check
from refspec.history.claims.eagle_round import (
    FIRST_WORKER,
    PAGES,
    RELEASE,
    SERVER,
    TARGET,
    TREES,
    WORKER,
    assignments,
    calls_of,
    draft_forwards_of,
    follow_round,
    made_before,
    settings_of,
    shows,
)
from refspec.history.claims.evidence import change, commit, definition, definitions, each, full_path, grep
from refspec.history.claims.walk import UNKNOWN, Walk, walk, written
from refspec.history.claims.wording import listed
from refspec.history.clone import Clone, HistoryError

GIVING_BACK = ("restore_state", "clear_draft_cache", "token_to_kv_pool.free", "token_to_kv_pool_allocator.free")
NO_RADIX_CACHE = "self.disable_radix_cache"
CHUNK = "self.chunked_prefill_size"


@check("E22")
def draft_slots(clone: Clone) -> Sequence[Part]:
    """Draft allocates batch x topk x num_steps slots at once, with a backup."""
    known = definitions(clone, RELEASE, WORKER)
    agree, found, steps_written = [], [], ""
    for batch, topk, steps in ((1, 4, 3), (3, 2, 5), (2, 8, 4)):
        way = follow_round(known, settings_of("decode", steps=steps, topk=topk) | {"batch.batch_size()": batch})
        made = made_before(way, way.named("alloc_token_slots"), TARGET)
        sizes = [call.arguments[0] for call in made if call.arguments]
        if any(size is UNKNOWN for size in sizes):
            raise HistoryError(f"{RELEASE}: how many slots draft asks for cannot be read off its source")
        backed = all(call.keywords.get("backup_state") is True for call in made)
        agree.append((sizes == [batch * topk * steps], bool(made) and backed))
        found.append(f"{batch} x {topk} x {steps}: {listed(sizes)}")
        steps_written = f"{len(made_before(way, draft_forwards_of(way), TARGET))} steps where num_steps is {steps}"
    return [
        Part(
            "draft allocates batch x topk x num_steps slots, in one call",
            all(size for size, _ in agree),
            f"slots asked for at {'; '.join(found)}; the draft writes those of {steps_written}",
            command=shows(RELEASE, WORKER, known["EAGLEWorker.draft"]),
        ),
        Part(
            "and has the allocator's state backed up",
            all(backed for _, backed in agree),
            "each call asks for a backup" if all(b for _, b in agree) else "not each call asks for a backup",
            core=False,
        ),
    ]


@check("E23")
def when_draft_slots_go_back(clone: Clone) -> Sequence[Part]:
    """The allocator is rolled back after verification, by what was accepted."""
    revisions = (RELEASE, FIRST_WORKER, "013021b6a1", "d3d4d76758", PAGES)
    ways = {}
    for revision, known in zip(revisions, each(lambda one: definitions(clone, one, WORKER), revisions), strict=True):
        ways[revision] = follow_round(known, settings_of("decode"))
    back, verified = ways[RELEASE].at("restore_state"), ways[RELEASE].at(TARGET)
    given = [written(call.node.args[0]) for call in ways[RELEASE].named("restore_state") if call.node.args]
    draft = definition(clone, RELEASE, WORKER, "EAGLEWorker.draft")
    backups = " ".join(target for target, value in assignments(draft.node) if "backup_state=True" in value)
    whole = [name for name in given if re.search(rf"\b{re.escape(name)}\b", backups)]
    return [
        Part(
            "the allocator's state is restored after verification",
            bool(back and verified) and min(back) > max(verified),
            f"{RELEASE}: restore_state is {_place_of(back, verified)}; draft slots were given back "
            + ", ".join(
                f"at {one} {_place_of(ways[one].at(*GIVING_BACK), ways[one].at(TARGET))}" for one in revisions[1:]
            ),
            command=shows(RELEASE, WORKER, draft),
        ),
        Part(
            "acceptance decides what is given back",
            bool(given) and not whole,
            f"restore_state is given {', '.join(given) or 'nothing'}"
            f"{', the state as it was before drafting' if whole else ''}",
        ),
    ]


@check("E24")
def what_verification_frees(clone: Clone) -> Sequence[Part]:
    """Verification keeps the slots of what was accepted and frees the rest."""
    found = definition(clone, RELEASE, TREES, "EagleVerifyInput.verify")
    node = found.node
    freed = [call.args[0] for call in calls_of(node, "token_to_kv_pool_allocator.free") if call.args]
    masks = [written(one.slice) for one in freed if isinstance(one, ast.Subscript)]
    assigned = assignments(node)
    values = dict(assigned)
    rest = [mask for mask in masks if "True" in values.get(mask, "") and values.get(f"{mask}[accept_index]") == "False"]
    kept = sorted({value for target, value in assigned if target == "batch.out_cache_loc"})
    return [
        Part(
            "it frees the slots that were not accepted",
            bool(freed) and len(rest) == len(freed),
            "; ".join(
                f"{written(one)} is freed in line {one.lineno}"
                + (f", where {mask} leaves out accept_index" if mask in rest else "")
                for one, mask in zip(freed, masks or [""], strict=False)
            )
            or "it frees nothing",
            command=shows(RELEASE, TREES, found),
        ),
        Part(
            "it keeps those that were",
            bool(kept) and all(value.endswith("accept_index]") for value in kept),
            f"batch.out_cache_loc becomes {' or '.join(kept) or 'nothing else'}",
        ),
    ]


@check("E25")
def pages_and_branches(clone: Clone) -> Sequence[Part]:
    """With page_size above 1 each request is computed by itself, its last partial page copied; that is #4908."""
    revisions = (PAGES, RELEASE, "b1286a116a", "18fb51583f")
    ways = {}
    for revision, known in zip(revisions, each(lambda one: definitions(clone, one, WORKER), revisions), strict=True):
        ways[revision] = follow_round(known, settings_of("decode", topk=4, page=16))
    copies = {revision: bool(made_before(way, way.named("move_kv_cache"), TARGET)) for revision, way in ways.items()}
    chosen = {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8}
    settings = {f"self.speculative_{name}": value for name, value in chosen.items()}
    set_to = _started_server(clone, RELEASE, settings | {"self.page_size": 16})
    again = change(clone, "84ca0ffb8c", "eagle_info_v2.py")
    moved = sum("move_kv_cache(" in line for line in again.plus)
    return [
        Part(
            "#4908 takes page_size above 1 together with topk above 1",
            commit(clone, PAGES).pr == 4908 and not ways[PAGES].raised,
            "; ".join(f"{one}: {_outcome(ways[one], copies[one])}" for one in revisions)
            + f"; {RELEASE} sets topk to {set_to.get('self.speculative_eagle_topk', UNKNOWN)} when page_size is 16 and "
            "topk 4",
            command=shows(RELEASE, WORKER, definition(clone, RELEASE, WORKER, "EAGLEWorker.draft")),
        ),
        Part(
            "#4908 copies the last partial page",
            copies[PAGES],
            f"draft copies the cache at {', '.join(one for one in revisions if copies[one]) or 'none of these'}; "
            f"84ca0ffb8c adds {moved} such call(s) to the second version of the worker",
        ),
    ]


@check("E26")
def backup_and_restore(clone: Clone) -> Sequence[Part]:
    """Backup and restore is original to the design."""
    way = follow_round(definitions(clone, RELEASE, WORKER), settings_of("decode"))
    revisions = (FIRST_WORKER, f"{PAGES}^", PAGES)
    places = {
        one: {path for path, _, _ in grep(clone, one, "backup_state|restore_state", "/python")} for one in revisions
    }
    return [
        Part(
            "drafting backs the allocator's state up and restores it",
            bool(way.named("restore_state")),
            f"{RELEASE} {'does' if way.named('restore_state') else 'does not'}",
        ),
        Part(
            "it did so from the first",
            bool(places[FIRST_WORKER]),
            "files that speak of it: " + "; ".join(f"{len(places[one])} at {one}" for one in revisions),
            core=False,
        ),
    ]


@check("E27")
def in_the_radix_tree(clone: Clone) -> Sequence[Part]:
    """Accepted tokens enter the radix tree as ordinary ones do."""
    part_3, refactored = "ad20b7957e", "d3d4d76758"
    revisions = (RELEASE, part_3, f"{refactored}^", refactored)
    switched = dict(zip(revisions, each(partial(_switched, clone), revisions), strict=True))
    return [
        Part(
            "with EAGLE there is a radix cache",
            not switched[RELEASE][0],
            f"{RELEASE}: {_cache_and_chunks(switched[RELEASE])}",
        ),
        Part(
            "there was one from the first",
            not switched[part_3][0],
            "; ".join(f"{one}: {_cache_and_chunks(switched[one])}" for one in revisions[1:]),
            command=f"git show {refactored} -- :/{full_path(SERVER)}",
            core=False,
        ),
    ]


def _place_of(these: Sequence[int], those: Sequence[int]) -> str:
    if not these:
        return "not found"
    if not those or max(these) < min(those):
        return "before verification"
    return "after verification" if min(these) > max(those) else "before and after verification"


def _outcome(way: Walk, copies: bool) -> str:
    if way.raised:
        return f"raises {way.raised}"
    return f"drafts, and {'copies the cache' if copies else 'copies nothing in the cache'}"


def _started_server(clone: Clone, revision: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The server's settings once it has adjusted them, with EAGLE chosen and the rest as by default."""
    known = definitions(clone, revision, SERVER)
    values: dict[str, Any] = {}
    fields = known["ServerArgs"].node.body if "ServerArgs" in known else []
    for field in fields:
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Constant):
            values[f"self.{written(field.target)}"] = field.value.value
    values |= {"self.speculative_algorithm": "EAGLE", CHUNK: 8192} | dict(settings)
    return walk(known, "ServerArgs.__post_init__", values).values


def _switched(clone: Clone, revision: str) -> tuple[bool, int]:
    """With EAGLE: is the radix cache off, and of which size are chunks of prefill? -1: it is not chunked."""
    values = _started_server(clone, revision, {})
    found = values.get(NO_RADIX_CACHE, UNKNOWN), values.get(CHUNK, UNKNOWN)
    if UNKNOWN in found:
        raise HistoryError(f"{revision}: what EAGLE switches off cannot be read off its source")
    return found


def _cache_and_chunks(switched: tuple[bool, int]) -> str:
    off, chunk = switched
    return f"the radix cache is {'off' if off else 'on'}, prefill is {'not ' if chunk < 0 else ''}chunked"
