"""Runs the checks of claims, together, and says whether they agree with what the catalogue lists."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from refspec.history.catalogue import Claim
from refspec.history.claims.checking import BEYOND_GIT, CANNOT_SAY, CHECKS, FALSE, Finding, Part, verdict_of
from refspec.history.claims.evidence import NotThereError, NotYet, Shelf, shelf_of
from refspec.history.clone import Clone, HistoryError

_MODULES_OF_CHECKS = (
    *("eagle_arrival", "eagle_follow_ups", "eagle_worker", "eagle_slots", "eagle_later"),
    *("chain_rows", "tree_reland", "frozen_kv_mtp", "code_reading"),
)


@dataclass(frozen=True)
class Verdict:
    """A claim, and what became of its check.

    finding: None where nothing was checked: there is no clone, or the claim is beyond git. beyond_git: why it is; "".
    """

    claim: Claim
    finding: Finding | None
    beyond_git: str = ""

    @property
    def agrees(self) -> bool | None:
        """Did the check find what is listed? None: it was not checked, or could not be."""
        if self.finding is None or self.finding.verdict == CANNOT_SAY:
            return None
        return self.finding.verdict == self.claim.verdict


def verdicts(clone: Clone | None, claims: Sequence[Claim]) -> list[Verdict]:
    """What a clone says of each claim, in their order. Without a clone nothing is checked.

    All checks are run up to where they need something of the clone; what they need is fetched, by one git process for
    each kind; then those that needed something are run again.
    """
    for name in _MODULES_OF_CHECKS:
        importlib.import_module(f"refspec.history.claims.{name}")
    found: dict[str, Finding] = {}
    pending = [claim.id for claim in claims if claim.id in CHECKS] if clone else []
    while clone and pending:
        shelf = shelf_of(clone)
        with shelf.gathering():
            for claim_id in pending:
                try:
                    found[claim_id] = _finding(claim_id, clone, shelf)
                except NotYet:
                    continue
        pending = [claim_id for claim_id in pending if claim_id not in found]
    return [Verdict(claim, found.get(claim.id), BEYOND_GIT.get(claim.id, "")) for claim in claims]


def _finding(claim_id: str, clone: Clone, shelf: Shelf) -> Finding:
    with shelf.trailing() as commands:
        try:
            answer = CHECKS[claim_id](clone)
        except NotThereError as error:
            answer = Finding(FALSE, (Part("what the claim is about is there", False, str(error)),))
        except HistoryError as error:
            answer = Finding(CANNOT_SAY, note=str(error))
    if not isinstance(answer, Finding):
        answer = Finding(verdict_of(answer), tuple(answer))
    return replace(answer, commands=tuple(commands))
