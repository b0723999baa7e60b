"""Inputs for `walk_tree`, and words for its wrong answers.

Trees are drawn with any numbering of their rows (the root is row 0) and any order of siblings, and may be deeper than
num_steps. Siblings hold different tokens, as the draft's do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from refspec.grader.compare import Arrays, Difference
from refspec.grader.problems import Case, Explanation, Pick, Problem

NONE = -1
ORDINALS = ("first", "second", "third", "fourth", "fifth")


def _case(tokens: object, first_child: object, next_sibling: object, choice: object, num_steps: int) -> Case:
    candidates = np.array(tokens, dtype=np.int64)
    return {
        "candidates": candidates,
        "retrieve_index": np.arange(candidates.size).reshape(candidates.shape),
        "retrieve_next_token": np.array(first_child, dtype=np.int64),
        "retrieve_next_sibling": np.array(next_sibling, dtype=np.int64),
        "target_predict": np.array(choice, dtype=np.int64),
        "num_steps": num_steps,
    }


EXAMPLES = (
    # 5 -> 7 (row 2, the root's second child) -> 9 (row 3), then 4 as the bonus
    _case([[5, 6, 7, 9]], [[1, -1, 3, -1]], [[-1, 2, -1, -1]], [[7, 1, 9, 4]], 2),
    # nothing accepted; and a chain, accepted whole
    _case([[5, 6, 7], [3, 4, 8]], [[1, -1, -1], [1, 2, -1]], [[-1, 2, -1], [-1, -1, -1]], [[9, 6, 7], [4, 8, 2]], 2),
)


def draw(pick: Pick, kind: int, size: int) -> Case:
    """kind 0 anything, 1 a chain, 2 nothing fits, 3 all fits, 4 several requests, 5 deeper than the steps, 6 a star,
    7 a chain accepted to its end.
    """
    n = pick({0: 1, 7: size + 2}.get(kind, 3), 2 * size + 1 if kind == 0 else 2 * size + 2)
    b = pick(2 if kind == 4 else 1, 3)
    num_steps = 1 if kind == 5 else n - 1 if kind == 7 else pick(1, size + 2)
    rows = [_draw_request(pick, kind, n) for _ in range(b)]
    tokens, first_child, next_sibling, choice = zip(*rows, strict=True)
    return _case(tokens, first_child, next_sibling, choice, num_steps)


def _draw_request(pick: Pick, kind: int, n: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """One tree: grown from the root, its rows numbered anew, and for each node what the target wants."""
    new_number = [0, *_shuffled(pick, list(range(1, n)))]
    children: list[list[int]] = [[] for _ in range(n)]
    for node in range(1, n):
        parent = node - 1 if kind in (1, 5, 7) else 0 if kind == 6 else pick(0, node - 1)
        children[new_number[parent]].append(new_number[node])
    tokens, first_child, next_sibling = [NONE] * n, [NONE] * n, [NONE] * n
    tokens[0] = pick(0, 9)
    choice = [0] * n
    for node in range(n):
        mine = children[node] = _shuffled(pick, children[node])
        for child, sibling in zip(mine, [*mine, NONE][1:], strict=True):
            next_sibling[child] = sibling
            tokens[child] = pick(0, 9)
            while tokens[child] in [tokens[other] for other in mine if other != child]:
                tokens[child] = (tokens[child] + 1) % 13
        first_child[node] = mine[0] if mine else NONE
    for node in range(n):
        mine = children[node]
        fits = bool(mine) and kind != 2 and (kind in (3, 5, 7) or pick(0, 4) > 0)
        if fits:
            choice[node] = tokens[mine[pick(0, len(mine) - 1)]]
        else:
            choice[node] = pick(0, 12)
            while choice[node] in [tokens[child] for child in mine]:
                choice[node] += 1
    return tokens, first_child, next_sibling, choice


def _shuffled(pick: Pick, items: list[int]) -> list[int]:
    """Left as it is by a pick that picks the smallest."""
    rest = list(items)
    return [rest.pop(pick(0, len(rest) - 1)) for _ in items]


def explain(case: Case, right: Arrays, yours: Arrays, difference: Difference) -> Explanation:
    """In the words of the walk."""
    assert difference.index is not None
    tokens = _array(case, "candidates")
    n = tokens.shape[1]
    name = difference.output
    request = difference.index[0] // n if name == "predict" else difference.index[0]
    path = [int(row) for row in yours["accept_index"][request]]
    if name == "accept_index":
        said = _about_path(case, right, path, request, difference.index[1])
    elif name == "accept_token_num":
        accepted = sum(row != NONE for row in path) - 1
        said = (
            f"your walk accepts {_counted(accepted, 'node')} after the root, and accept_token_num says "
            f"{int(yours[name][request])}; neither the root nor the bonus counts"
        )
    else:
        said = _about_predict(
            case, right, int(yours[name][difference.index]), request, difference.index[0] - request * n
        )
    who = f"request {request}: " if len(tokens) > 1 else ""
    return Explanation(who + said, _picture_request(case, request, [row - request * n for row in path]))


def picture(case: Case) -> RenderableType:
    """The first request's tree."""
    return _picture_request(case, 0, [])


def _about_path(case: Case, right: Arrays, path: list[int], request: int, depth: int) -> str:
    tokens, choice = _array(case, "candidates")[request], _array(case, "target_predict")[request]
    n, row = len(tokens), path[depth]
    offset = request * n
    if depth == 0:
        return f"accept_index begins with the root's global row; yours begins with {row}"
    node = int(right["accept_index"][request, depth - 1]) - offset
    fitting = int(right["accept_index"][request, depth])
    children = list(_children(case, request, node)) if node >= 0 else []
    filled = len(set(path[depth:])) == 1 and (depth < len(path) - 1 or row in (0, offset, path[depth - 1]))
    if fitting == NONE and filled and row - offset not in children and row not in children:
        return f"the path has {_counted(depth, 'node')}; behind its end accept_index must be -1, and yours is {row}"
    if node < 0:
        return f"the path ended before, and the rest is -1; your accept_index goes on with {row}"
    wants = f"after node {node} the target wants {choice[node]}"
    if row != NONE and not offset <= row < offset + n:
        where = "they are local to the request" if 0 <= row < n else "no request has it"
        return f"global rows of request {request} are {offset} to {offset + n - 1}; your walk names {row}: {where}"
    if fitting == NONE:
        went = f"your walk went on to node {row - offset}"
        if choice[node] in tokens[children]:
            return f"num_steps = {case['num_steps']} drafts are accepted, and no more can be; {went}"
        return f"{wants}; {'none of its children holds that' if children else 'it has no child'}, but {went}"
    child = fitting - offset
    place = children.index(child)
    which = f"its {ORDINALS[place]} child" if place < len(ORDINALS) else "a later child of it"
    did = "stopped" if row == NONE else f"went to node {row - offset}"
    return f"{wants}, and node {child}, {which}, holds that; but your walk {did}"


def _about_predict(case: Case, right: Arrays, value: int, request: int, node: int) -> str:
    offset = request * _array(case, "candidates").shape[1]
    path = [int(row) - offset for row in right["accept_index"][request] if row != NONE]
    if node not in path:
        return f"predict[{offset + node}] is {value}, but node {node} is not on the accepted path: its row stays 0"
    said = f"predict[{offset + node}] is {value}; node {node} is on the path, its row holds what the target wants after"
    return f"{said} it: at the end of the path, the bonus" if node == path[-1] else f"{said} it"


def _children(case: Case, request: int, node: int) -> Iterator[int]:
    """In the order of their links."""
    child = int(_array(case, "retrieve_next_token")[request, node])
    while child != NONE:
        yield child
        child = int(_array(case, "retrieve_next_sibling")[request, child])


def _picture_request(case: Case, request: int, path: list[int]) -> RenderableType:
    """The tree by its links; `path`: the learner's, in local rows."""
    tokens, choice = _array(case, "candidates")[request], _array(case, "target_predict")[request]

    def label(node: int) -> Text:
        text = Text(f"node {node}  token {tokens[node]}", style="bold" if node in path else "")
        text.append(f"   then the target wants {choice[node]}", style="dim")
        if node in path:
            text.append(f"   your walk, step {path.index(node)}", style="cyan")
        return text

    def grow(tree: Tree, node: int) -> Tree:
        for child in _children(case, request, node):
            grow(tree.add(label(child)), child)
        return tree

    of = ""
    if len(_array(case, "candidates")) > 1:
        first = request * len(tokens)
        of = f" of request {request}, whose global rows are {first} to {first + len(tokens) - 1}"
    return Group(Text(f"the tree{of}; num_steps = {case['num_steps']}"), grow(Tree(label(0), guide_style="dim"), 0))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _array(case: Case, name: str) -> np.ndarray:
    value = case[name]
    assert isinstance(value, np.ndarray)
    return value


PROBLEM = Problem(
    outputs=("predict", "accept_index", "accept_token_num"),
    shapes={"predict": "(b*N)", "accept_index": "(b, num_steps+1)", "accept_token_num": "(b)"},
    reading_order=("accept_index", "accept_token_num", "predict"),
    examples=EXAMPLES,
    kinds=8,
    draw=draw,
    explain=explain,
    picture=picture,
)
