"""What a check of a claim is, what it finds, and the verdict that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refspec.history.clone import Clone

TRUE, FALSE, IMPRECISE = "true", "false", "imprecise"
CANNOT_SAY = "cannot say"


@dataclass(frozen=True)
class Part:
    """One statement that a claim comes to.

    says: the statement, as the claim has it. holds: is it so? found: what the clone shows, with revision, path and
    figure. core: without it the claim is false; of another that does not hold, the claim is imprecise. command: what
    shows it to a reader who pastes it into a shell in the clone, if what the check read (Finding.commands) does not.
    """

    says: str
    holds: bool
    found: str
    core: bool = True
    command: str = ""


@dataclass(frozen=True)
class Finding:
    """What became of the check of a claim.

    verdict: of the catalogue's kind, or CANNOT_SAY. note: why, where the parts do not say it: what the clone lacks, or
    what is beyond git. commands: what shows a reader what the check has read, in its order.
    """

    verdict: str
    parts: tuple[Part, ...] = ()
    note: str = ""
    commands: tuple[str, ...] = ()


# A check reads through refspec.history.claims.evidence, raises nothing of its own, and may be called several times. It
# returns a Finding where the verdict is of another kind than `verdict_of` gives ("yes", "not checkable in git").
CheckFunction = Callable[[Clone], "Sequence[Part] | Finding"]

CHECKS: dict[str, CheckFunction] = {}

# Claims that no clone can decide, and why. Each claim of the catalogue is either here or in CHECKS. A claim that the
# catalogue's facts about wheels decide is in CHECKS.
BEYOND_GIT: dict[str, str] = {}


def check(claim_id: str) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a function as the check of a claim, as in @check("E7")."""

    def register(function: CheckFunction) -> CheckFunction:
        if claim_id in CHECKS:
            raise ValueError(f"claim {claim_id} has two checks")
        CHECKS[claim_id] = function
        return function

    return register


def verdict_of(parts: Sequence[Part]) -> str:
    """All parts hold: true. A core part does not: false. Only others do not: imprecise."""
    if not parts:
        raise ValueError("a check without parts decides nothing")
    if all(part.holds for part in parts):
        return TRUE
    return IMPRECISE if all(part.holds for part in parts if part.core) else FALSE
