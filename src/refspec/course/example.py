"""The example that the lessons work out by hand: a root, k = 2 branches, S = 3 levels, N = 7 nodes.

A draft that we make up gives probabilities, a target that we make up gives its choices. Everything else is what the
engine's own functions make of them, so the tables in the lessons cannot differ from what the code does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refspec.kernels import build_tree, verify_tree_greedy
from refspec.spec.draft import select_top_k_tokens
from refspec.spec.tree import organize_draft_results

TOPK, NUM_STEPS, NUM_DRAFT_TOKENS, SEQ_LEN = 2, 3, 7, 4
ROOT = "the"
# What the draft holds likely after a path, the best TOPK of it. Only the branches that are followed are asked.
DRAFT = {
    "the": {"cat": 0.6, "dog": 0.25},
    "the cat": {"sat": 0.5, "ran": 0.25},
    "the dog": {"ran": 0.6, "sat": 0.1},
    "the cat sat": {"down": 0.5, "still": 0.25},
    "the cat ran": {"off": 0.8, "home": 0.1},
}
# The target's choice after a path; after the paths that are not here it says "." .
TARGET = {"the": "cat", "the cat": "ran", "the cat ran": "home", "the dog": "sat", "the cat sat": "still"}
WORDS = [ROOT, *dict.fromkeys([*(word for best in DRAFT.values() for word in best), *TARGET.values(), "."])]


@dataclass(frozen=True)
class Example:
    """What the functions gave back, one request; shapes as in contracts.py, without the batch dimension."""

    scores: list[float]  # (pool)
    tokens: list[int]  # (pool)
    parent_list: list[int]  # (k(S-1) + 1)
    chosen: list[list[int]]  # the pool indices that each level's branches are
    top_scores_index: list[int]  # (N - 1)
    rows: list[int]  # (N) the tree's tokens
    positions: list[int]  # (N)
    tree_mask: list[list[bool]]  # (N, N)
    retrieve_next_token: list[int]  # (N)
    retrieve_next_sibling: list[int]  # (N)
    target_predict: list[int]  # (N)
    predict: list[int]  # (N)
    accept_index: list[int]  # (S + 1)
    accept_token_num: int


def work_out() -> Example:
    """Draft, tree and walk of the example, by the engine's functions."""
    hidden = torch.zeros(1, 1)
    topk_p, topk_index = _best([ROOT])
    scores, paths = topk_p, [f"{ROOT} {word}" for word in DRAFT[ROOT]]
    levels = []
    for i in range(NUM_STEPS):
        input_ids, hidden, scores, level = select_top_k_tokens(i, topk_p, topk_index, hidden, scores, TOPK)
        levels.append(level)
        if i > 0:
            branch = (level[2] - TOPK) % TOPK**2 // TOPK  # of the parent, in the level before
            paths = [f"{paths[b]} {WORDS[t]}" for b, t in zip(branch[0].tolist(), input_ids.tolist(), strict=True)]
        if i < NUM_STEPS - 1:
            topk_p, topk_index = _best(paths)
    score_list, token_list, parents_list = (list(column) for column in zip(*levels, strict=True))
    parent_list, kept, tokens = organize_draft_results(score_list, token_list, parents_list, NUM_DRAFT_TOKENS)
    mask, positions, retrieve_index, first_child, next_sibling = build_tree(
        parent_list, kept, torch.tensor([SEQ_LEN]), TOPK, NUM_STEPS, NUM_DRAFT_TOKENS, mask_mode="qlen"
    )
    rows = torch.cat([torch.tensor([[WORDS.index(ROOT)]]), tokens], dim=1)
    tree_mask = mask.view(NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS)
    target_predict = torch.tensor([[_choice(tree_mask[row], rows[0]) for row in range(NUM_DRAFT_TOKENS)]])
    predict, accept_index, accept_token_num = verify_tree_greedy(
        rows, retrieve_index, first_child, next_sibling, target_predict, NUM_STEPS
    )
    return Example(
        scores=torch.cat([level.flatten(1) for level in score_list], dim=1)[0].tolist(),
        tokens=torch.cat(token_list, dim=1)[0].tolist(),
        parent_list=parent_list[0].tolist(),
        chosen=[entries[0].tolist() for entries in [parents_list[0][:, 1:], *parents_list[1:]]],
        top_scores_index=kept[0].tolist(),
        rows=rows[0].tolist(),
        positions=positions.tolist(),
        tree_mask=tree_mask.tolist(),
        retrieve_next_token=first_child[0].tolist(),
        retrieve_next_sibling=next_sibling[0].tolist(),
        target_predict=target_predict[0].tolist(),
        predict=predict.tolist(),
        accept_index=accept_index[0].tolist(),
        accept_token_num=int(accept_token_num[0]),
    )


def candidates_table() -> str:
    """The pool: level by level, who each candidate hangs under, and its score."""
    seen = work_out()
    rows = []
    for i, (token, score) in enumerate(zip(seen.tokens, seen.scores, strict=True)):
        level = 0 if i < TOPK else 1 + (i - TOPK) // TOPK**2
        parent = seen.parent_list[i // TOPK]
        above = ROOT if parent < 0 else f"{WORDS[seen.tokens[parent]]} ({parent})"
        branch = "yes" if i in seen.chosen[level] and level < NUM_STEPS - 1 else ""
        kept = "yes" if i in seen.top_scores_index else ""
        rows.append([str(level), str(i), WORDS[token], above, f"{score:.3f}", branch, kept])
    return _table(["level", "pool index", "word", "under", "score", "followed", "kept"], rows)


def parent_list_table() -> str:
    """parent_list, entry by entry."""
    entries = work_out().parent_list
    groups = [f"{g * TOPK} and {g * TOPK + 1}" for g in range(len(entries))]
    rows = [[str(g), str(entry), groups[g]] for g, entry in enumerate(entries)]
    return _table(["entry g", "parent_list[g]", "whose children are the candidates"], rows)


def tree_table() -> str:
    """The tree: rows, links, positions, mask."""
    seen = work_out()
    pool = ["", *map(str, seen.top_scores_index)]
    rows = [
        [
            str(row),
            WORDS[seen.rows[row]],
            pool[row],
            str(seen.retrieve_next_token[row]),
            str(seen.retrieve_next_sibling[row]),
            str(seen.positions[row]),
            f"`{''.join('█' if sees else '·' for sees in seen.tree_mask[row])}`",
        ]
        for row in range(NUM_DRAFT_TOKENS)
    ]
    return _table(["row", "word", "pool index", "first child", "next sibling", "position", "may attend"], rows)


def walk_table() -> str:
    """What the target says at each row, and what the walk makes of it."""
    seen = work_out()
    path = [row for row in seen.accept_index if row >= 0]
    rows = [
        [
            str(row),
            WORDS[seen.rows[row]],
            WORDS[seen.target_predict[row]],
            "yes" if row in path else "",
            WORDS[seen.predict[row]] if row in path else "0",
        ]
        for row in range(NUM_DRAFT_TOKENS)
    ]
    return _table(["row", "word", "the target's choice after it", "accepted", "predict"], rows)


def outcome() -> str:
    """What the walk returned, in words."""
    seen = work_out()
    committed = [WORDS[seen.predict[row]] for row in seen.accept_index if row >= 0]
    return (
        f"`accept_index` is `{seen.accept_index}`, `accept_token_num` is `{seen.accept_token_num}`, and the round "
        f"commits {len(committed)} tokens: {', '.join(f'*{word}*' for word in committed)}."
    )


TABLES: dict[str, Callable[[], str]] = {
    "candidates": candidates_table,
    "parent_list": parent_list_table,
    "tree": tree_table,
    "walk": walk_table,
    "outcome": outcome,
}


def _best(paths: Sequence[str]) -> tuple[Tensor, Tensor]:
    """What an extend or a draft forward would have given: probabilities and ids, (rows, k)."""
    best = [DRAFT[path] for path in paths]
    probabilities = torch.tensor([list(words.values()) for words in best])
    return probabilities, torch.tensor([[WORDS.index(word) for word in words] for words in best])


def _choice(visible: Tensor, rows: Tensor) -> int:
    path = " ".join(WORDS[token] for token in rows[visible].tolist())
    return WORDS.index(TARGET.get(path, "."))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
