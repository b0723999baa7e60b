"""Inputs for `next_beams`, and words for its wrong answers.

Probabilities are multiples of 1/16, path scores of 1/64: their products are exact in float32, so that ties are ties in
whatever way a learner multiplies. Every hidden state is another one. The children of one beam hold different tokens,
those of two beams may hold the same one. At level 0 `scores` holds what is of no use.
"""

from __future__ import annotations

import numpy as np
from rich import box
from rich.table import Table

from refspec.grader.compare import Arrays, Difference
from refspec.grader.problems import Case, Explanation, Pick, Problem

EIGHTH, SIXTEENTH, SIXTY_FOURTH = 1 / 8, 1 / 16, 1 / 64
MOST_ROWS = 25  # children that a picture shows


def _case(level: int, p: object, tokens: object, hidden: object, scores: object) -> Case:
    path_scores = np.array(scores, dtype=np.float32)
    return {
        "i": level,
        "topk_p": np.array(p, dtype=np.float32),
        "topk_index": np.array(tokens, dtype=np.int64),
        "hidden_states": np.array(hidden, dtype=np.float32),
        "scores": path_scores,
        "topk": path_scores.shape[1],
    }


EXAMPLES = (
    _case(1, [[0.5, 0.5], [0.75, 0.25]], [[11, 12], [13, 14]], [[1], [2]], [[0.5, 0.25]]),
    _case(0, [[0.5, 0.25]], [[7, 8]], [[1, 2]], [[0.25, 1]]),
    _case(
        2,
        [[0.5, 0.25], [0.75, 0.25], [0.25, 0.25], [1, 0]],
        [[21, 23], [23, 24], [31, 32], [33, 34]],
        [[1, 2], [3, 4], [5, 6], [7, 8]],
        [[0.5, 0.25], [0.5, 0.125]],
    ),
)


def draw(pick: Pick, kind: int, size: int) -> Case:
    """kind 0 anything, 1 the first level, 2 one branch, 3 ties, 4 several requests, 5 a deep level, 6 zeros, 7 ties of
    many branches: sorting routines often leave equals in their order only where they are few.
    """
    levels = {0: (0, 3), 1: (0, 0), 5: (2, 4)}
    level = pick(*levels.get(kind, (1, 3)))
    k = 1 if kind == 2 else pick(5, 8) if kind == 7 else pick(1 if kind in (0, 1) else 2, max(size, 2))
    b = pick(2 if kind == 4 else 1, 3)
    width = pick(1, size)
    rows = b if level == 0 else b * k
    largest = 16 // k

    def descending(count: int, last: int) -> list[int]:
        return sorted((pick(0, last) for _ in range(count)), reverse=True)

    if kind in (3, 7):  # few values, many ties
        p = [[x * 4 for x in descending(k, max(largest // 4, 1))] for _ in range(rows)]
        scores = [[x * 16 for x in descending(k, 3)] for _ in range(b)]
    elif kind == 6:
        p = [[x if x > 1 else 0 for x in descending(k, min(largest, 4))] for _ in range(rows)]
        scores = [descending(k, 2) for _ in range(b)]
    else:
        p = [descending(k, largest) for _ in range(rows)]
        scores = [descending(k, 64) for _ in range(b)]
    tokens: list[list[int]] = []
    for _ in range(rows):
        ids: list[int] = []
        for _ in range(k):
            token = pick(1, 20)
            while token in ids:
                token = token % 20 + 1
            ids.append(token)
        tokens.append(ids)
    hidden = np.arange(1, rows * width + 1).reshape(rows, width)
    return _case(level, np.array(p) * SIXTEENTH, tokens, hidden, np.array(scores) * SIXTY_FOURTH)


def explain(case: Case, right: Arrays, yours: Arrays, difference: Difference) -> Explanation:
    """In the words of the draft: beams, children, path scores, pool."""
    assert difference.index is not None
    level, k = _number(case, "i"), _number(case, "topk")
    name, index = difference.output, difference.index
    request = index[0] if name not in ("input_ids", "hidden_states") else index[0] // k
    who = "" if len(_array(case, "scores")) == 1 else f"request {request}: "
    if name == "child_scores":
        child = f"child {index[2]}" if level == 0 else f"child {index[2]} of beam {index[1]}"
        how = "its own probability" if level == 0 else "its beam's path score times its own probability"
        said = f"the path score of {child} is {how}; yours is {_exact(yours[name][index])}"
    elif name == "child_tokens":
        said = "child_tokens lists the ids of all children, chosen or not, in the order in which they come"
    elif name == "input_ids" or (name == "scores" and _is_of_another_child(case, right, yours, request, index[1])):
        said = _about_choice(case, right, yours, request, index[1] if name == "scores" else index[0] % k)
    elif name == "scores":
        token = int(yours["input_ids"][request * k + index[1]])
        said = f"your beam {index[1]} is token {token}, and its score must be that child's path score; "
        said += f"yours is {_exact(yours[name][index])}"
    elif name == "entries":
        said = _about_entry(case, index[1], int(yours[name][index]))
    else:
        said = _about_hidden(case, right, yours, index[0])
    return Explanation(who + said, _picture_request(case, request, _chosen(case, yours, request)))


def picture(case: Case) -> Table:
    """The first request's beams and children."""
    return _picture_request(case, 0, [])


def _chosen(case: Case, yours: Arrays, request: int) -> list[int | None]:
    """Which child each new beam of an answer is, as a place among the request's children; None: no child has its token.

    Of several with its token: the one that its entry names, else the first that no beam before it is, else the first.
    """
    level, k = _number(case, "i"), _number(case, "topk")
    tokens = _array(case, "topk_index").reshape(len(_array(case, "scores")), -1)[request]
    entries = yours["entries"][request][-k:] - (0 if level == 0 else k + (level - 1) * k * k)
    chosen: list[int | None] = []
    for token, entry in zip(yours["input_ids"][request * k : (request + 1) * k], entries, strict=True):
        places = [int(place) for place in np.flatnonzero(tokens == token)]
        rest = [place for place in places if place not in chosen] or places
        chosen.append(int(entry) if entry in places else rest[0] if rest else None)
    return chosen


def _is_of_another_child(case: Case, right: Arrays, yours: Arrays, request: int, beam: int) -> bool:
    """Is the beam another child with the right token, and its score this child's?"""
    place = _chosen(case, yours, request)[beam]
    if _number(case, "i") == 0 or place is None:
        return False
    return bool(np.isclose(right["child_scores"][request].reshape(-1)[place], yours["scores"][request, beam]))


def _about_choice(case: Case, right: Arrays, yours: Arrays, request: int, beam: int) -> str:
    level, k = _number(case, "i"), _number(case, "topk")
    said = f"your beam {beam} is token {int(yours['input_ids'][request * k + beam])}"
    if level == 0:
        return f"at level 0 all k children become beams, in the order in which they come; {said}"
    paths, chosen = right["child_scores"][request].reshape(-1), _chosen(case, yours, request)
    row, place = int(right["entries"][request, beam]) - (k + (level - 1) * k * k), chosen[beam]
    token = int(_array(case, "topk_index").reshape(-1, k * k)[request, row])
    better = f"token {token}, child {row % k} of beam {row // k} ({_factors(case, request, row)})"
    if place is None:
        return f"{said}, and no child has it"
    if place in chosen[:beam]:
        return f"{said}, the same child as your beam {chosen.index(place)}; the next best is {better}"
    if paths[place] == paths[row]:
        return f"{said}; {better} ties with it and comes first in the pool"
    if paths[place] < paths[row]:
        return f"{said} ({_factors(case, request, place)}), but {better} scores higher"
    return f"{said} ({_factors(case, request, place)}), where {better} must be"


def _about_entry(case: Case, place: int, entry: int) -> str:
    level, k = _number(case, "i"), _number(case, "topk")
    if level == 0:
        return f"the entries of level 0 are those of the root and of all its children; your entry {place} is {entry}"
    said = f"entry {place} is the pool index of your beam {place}; yours is {entry}"
    first = k + (level - 1) * k * k
    if not first <= entry < first + k * k:
        return f"{said}, which is no child of level {level}"
    return f"{said}, which is child {(entry - first) % k} of beam {(entry - first) // k}"


def _about_hidden(case: Case, right: Arrays, yours: Arrays, row: int) -> str:
    level, k, given = _number(case, "i"), _number(case, "topk"), _array(case, "hidden_states")
    said = f"row {row} of hidden_states belongs to token {int(right['input_ids'][row])}, and must be its parent's"
    for parent, state in enumerate(given):
        if np.array_equal(state, yours["hidden_states"][row]):
            whose = f"request {parent}" if level == 0 else f"beam {parent % k}"
            if level > 0 and len(_array(case, "scores")) > 1:
                whose += f" of request {parent // k}"
            return f"{said}; yours is that of {whose}"
    return f"{said}; yours is nobody's"


def _factors(case: Case, request: int, row: int) -> str:
    k = _number(case, "topk")
    score = _array(case, "scores")[request, row // k]
    own = _array(case, "topk_p").reshape(-1, k * k)[request, row]
    return f"{_exact(score)} * {_exact(own)} = {_exact(score * own)}"


def _picture_request(case: Case, request: int, chosen: list[int | None]) -> Table:
    level, k = _number(case, "i"), _number(case, "topk")
    own = _array(case, "topk_p").reshape(-1, k if level == 0 else k * k)[request]
    tokens = _array(case, "topk_index").reshape(-1, len(own))[request]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", title_style="")
    many = len(_array(case, "scores")) > 1
    table.title = f"level {level}, k = {k}" + (f", request {request}" if many else "") + ": the children"
    for heading in ("parent", "its path score", "child", "token", "own probability"):
        table.add_column(heading, justify="left" if heading == "parent" else "right")
    if chosen:
        table.add_column("your choice")
    for row in range(min(len(own), MOST_ROWS)):
        parent, score = (
            ("root", "") if level == 0 else (f"beam {row // k}", _exact(_array(case, "scores")[request, row // k]))
        )
        cells = [parent if row % k == 0 else "", score if row % k == 0 else "", str(row % k)]
        cells += [str(tokens[row]), _exact(own[row])]
        if chosen:
            beams = [str(beam) for beam, place in enumerate(chosen) if place == row]
            cells.append(f"new beam {' and '.join(beams)}" if beams else "")
        table.add_row(*cells, style="bold" if chosen and cells[-1] else "")
    if len(own) > MOST_ROWS:
        table.caption = f"and {len(own) - MOST_ROWS} more"
    return table


def _exact(value: np.floating) -> str:
    return f"{float(value):.12g}"


def _number(case: Case, name: str) -> int:
    value = case[name]
    assert isinstance(value, int)
    return value


def _array(case: Case, name: str) -> np.ndarray:
    value = case[name]
    assert isinstance(value, np.ndarray)
    return value


PROBLEM = Problem(
    outputs=("input_ids", "hidden_states", "scores", ("child_scores", "child_tokens", "entries")),
    shapes={
        "input_ids": "(b*k)",
        "hidden_states": "(b*k, H)",
        "scores": "(b, k)",
        "child_scores": "(b, 1, k) at level 0, else (b, k, k)",
        "child_tokens": "(b, k) at level 0, else (b, k*k)",
        "entries": "(b, k+1) at level 0, else (b, k)",
    },
    reading_order=("child_scores", "child_tokens", "input_ids", "scores", "entries", "hidden_states"),
    examples=EXAMPLES,
    kinds=8,
    draw=draw,
    explain=explain,
    picture=picture,
)
