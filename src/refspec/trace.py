"""A round as data: the one format that the terminal, the notebooks and the site's replay read.

A trace holds what the engine saw and did, not what it might mean: pool indices, rows, slots, scores. Whoever draws
it needs no torch. `Trace.model_json_schema()` is the schema; SCHEMA_VERSION changes when a reader would have to.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

SCHEMA_VERSION = 2


class TraceError(ValueError):
    """A file that is no trace, or one of another version."""


class _Event(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Candidate(_Event):
    """One child that the draft came up with. Its place in the list is its pool index."""

    token: int
    parent: int  # pool index, -1 for the root
    score: float | None  # product of the probabilities from the root; None: it was looked up, nobody scored it


class TreeRequest(_Event):
    """One request in one round. Rows and columns count within the request; row 0 is the root.

    Where guesses are looked up, they are the candidates, all of them kept, and there are no draft slots. Rows that only
    fill the tree up are left out, but for their slots.
    """

    request: int  # which prompt of the run
    seq_len: int  # committed tokens in the KV cache before the round
    bonus_token: int  # the root
    candidates: list[Candidate]
    kept: list[int]  # pool indices, ascending: rows 1, 2, ... of the tree
    parents: list[int]  # row of each row's parent, -1 for the root
    positions: list[int]
    tree_mask: list[str]  # one string of 0 and 1 for each row: whom it attends within the tree
    target_predict: list[int]  # the target's choice after each row
    accepted_rows: list[int]  # the path that the walk took, root first
    committed: list[int]  # tokens appended to the output, bonus last unless a stop cut the block
    finish_reason: str | None
    draft_slots: list[list[int]]  # [branch][step], free again before verify; branches without any where none are taken
    verify_slots: list[int]  # one for each row, and then those of rows that were left out
    kept_slots: list[int]  # those of the committed path

    @property
    def levels(self) -> int:
        """Levels that were drafted: k candidates are from the first, k² from each of the others. 0: looked up."""
        k = len(self.draft_slots)
        return 1 + (len(self.candidates) - k) // k**2 if k else 0


class Round(_Event):
    """One speculative round of a batch."""

    number: int  # from 0, over the life of the engine
    requests: list[TreeRequest]
    # Of this round alone:
    slots_taken: dict[str, int]  # by phase
    slots_returned: dict[str, int]  # by phase
    forwards: dict[str, int]  # target, draft, extend
    launches: dict[str, int]  # by operation of refspec.kernels


class Output(_Event):
    """One request, when it is done."""

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    accept_lens: list[int]


class _Version(BaseModel):
    """Looked at first: another version's fields mean nothing here."""

    schema_version: int = SCHEMA_VERSION


class Trace(_Event):
    """One run of the engine."""

    schema_version: int = SCHEMA_VERSION
    config: dict[str, str | int | float | bool | None]
    vocabulary: dict[int, str]  # the text of every id that occurs
    rounds: list[Round]
    outputs: list[Output]

    def save(self, file: Path) -> None:
        file.write_text(self.model_dump_json() + "\n", encoding="utf-8")

    @staticmethod
    def load(file: Path) -> Trace:
        """Raises TraceError, naming the file and the first thing wrong with it."""
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"cannot read the trace {file}: {error}") from None
        try:
            version = _Version.model_validate_json(text).schema_version
            if version != SCHEMA_VERSION:
                raise TraceError(f"{file} has trace version {version}, this refspec reads {SCHEMA_VERSION}")
            return Trace.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the document"
            raise TraceError(f"{file} is no trace of this version ({where}: {first['msg']})") from None
