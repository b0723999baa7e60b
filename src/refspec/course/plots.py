"""Figures of a round, drawn by matplotlib from its trace alone.

Figures stand on light cards: no colour of text is easy to read on white and on a dark page alike. The colours keep
apart for colour-blind readers (they are Okabe and Ito's, with the orange darker, since it is used for text), and none
carries a meaning that a shape or a word does not carry too.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from refspec.trace import Round, TreeRequest

CARD, INK, QUIET, EDGE, FAINT = "#fbfbf8", "#22262b", "#666b72", "#a9aea8", "#d9dbd6"
BLUE, ORANGE = "#0072B2", "#b04a00"
TOKEN_FONT: dict[str, Any] = {"family": "DejaVu Sans Mono", "size": 9}  # comes with matplotlib
LONGEST_TOKEN = 11  # characters; longer ones are cut


def use_style() -> None:
    """Set matplotlib up for all figures that follow, whatever the user's own settings are."""
    plt.style.use("default")
    plt.rcParams.update(
        {
            "figure.facecolor": CARD,
            "axes.facecolor": CARD,
            "text.color": INK,
            "axes.edgecolor": QUIET,
            "axes.labelcolor": INK,
            "xtick.color": QUIET,
            "ytick.color": QUIET,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": "medium",
            "axes.titlelocation": "left",
            "font.size": 10,
            "legend.frameon": False,
            "figure.dpi": 144,
            "figure.constrained_layout.use": True,
        }
    )


def token_text(token: int, vocabulary: Mapping[int, str]) -> str:
    """A token on one line, spaces and line breaks visible, cut where it is long; its id where it is no character."""
    text = vocabulary.get(token, "\ufffd")
    if "\ufffd" in text:
        return f"<{token}>"
    shown = "".join(repr(character)[1:-1] for character in text).replace(" ", "␣")
    return shown if len(shown) <= LONGEST_TOKEN else shown[: LONGEST_TOKEN - 1] + "…"


def row_labels(tree: TreeRequest, vocabulary: Mapping[int, str]) -> list[str]:
    """The text of each row of the tree, the root first."""
    tokens = [tree.bonus_token, *(tree.candidates[i].token for i in tree.kept)]
    return [token_text(token, vocabulary) for token in tokens]


def draw_pool(ax: Axes, tree: TreeRequest) -> None:
    """All candidates: the probability of the path to each, level by level; those that the tree keeps are filled."""
    topk, num_steps = len(tree.draft_slots), tree.levels
    scores = np.array([candidate.score for candidate in tree.candidates])
    first_of_level = [0, *(topk + level * topk**2 for level in range(num_steps))]
    place = np.empty(len(scores))
    for level, (first, end) in enumerate(pairwise(first_of_level)):
        place[first:end] = level + 0.7 * (np.arange(end - first) / max(topk**2 - 1, 1) - 0.5)
        if level == 0:  # fewer than in the other levels: in the middle
            place[first:end] += level - place[first:end].mean()
    kept = np.isin(np.arange(len(scores)), tree.kept)
    ax.scatter(place[~kept], scores[~kept], s=22, facecolors="none", edgecolors=QUIET, label=f"not kept: {sum(~kept)}")
    ax.scatter(place[kept], scores[kept], s=30, color=BLUE, label=f"kept: {sum(kept)}")
    ax.axhline(scores[kept].min(), color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.set_yscale("log")
    sizes = [end - first for first, end in pairwise(first_of_level)]
    ax.set_xticks(range(num_steps), [f"level {i}\n{size} candidates" for i, size in enumerate(sizes)])
    ax.set_ylabel("probability of the path")
    ax.legend(loc="lower left")


def draw_tree(ax: Axes, tree: TreeRequest, vocabulary: Mapping[int, str]) -> None:
    """The tree, one line for each of its rows, so that a mask of the same rows fits beside it.

    Tokens stand at the left. The accepted path is thick; at the right stands the target's choice after each row, with
    a star where it is the bonus.
    """
    path = tree.accepted_rows
    depths = [position - tree.positions[0] for position in tree.positions]
    choices_at = max(depths) + 0.5
    for row, (depth, parent) in enumerate(zip(depths, tree.parents, strict=True)):
        on_path, is_bonus = row in path, row == path[-1]
        if row:
            colour, width = (BLUE, 2.5) if on_path else (EDGE, 1.1)
            ax.plot([depths[parent], depth], [parent, row], color=colour, linewidth=width, zorder=1 + on_path)
        face, edge = (BLUE, BLUE) if on_path else (CARD, QUIET)
        ax.scatter(depth, row, s=30, facecolors=face, edgecolors=edge, zorder=3)
        choice = token_text(tree.target_predict[row], vocabulary) + (" ★" if is_bonus else "")
        colour = ORANGE if is_bonus else BLUE if on_path else QUIET
        weight = "bold" if on_path else "normal"
        ax.text(choices_at, row, choice, color=colour, weight=weight, va="center", **TOKEN_FONT)
    labels = row_labels(tree, vocabulary)
    ax.set_xlim(-0.3, choices_at + 1.6)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set_xticks(range(max(depths) + 1))
    ax.set_xlabel("depth", loc="left")
    ax.text(choices_at, -0.9, "target's choice", va="bottom", size="small")
    ax.text(-0.42, -0.9, "token, row", va="bottom", ha="right", size="small")
    ax.set_yticks(range(len(labels)), [f"{label} {row:>2}" for row, label in enumerate(labels)], **TOKEN_FONT)
    for row in path:
        ax.get_yticklabels()[row].set(color=BLUE, weight="bold")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def draw_mask(ax: Axes, tree: TreeRequest, vocabulary: Mapping[int, str]) -> None:
    """The tree mask: a cell is filled where the row's token attends the column's; rows of the accepted path in blue."""
    labels = row_labels(tree, vocabulary)
    cells = np.array([[int(bit) for bit in row] for row in tree.tree_mask])
    cells[tree.accepted_rows] *= 2
    edges = np.arange(len(labels) + 1) - 0.5
    ax.pcolormesh(edges, edges, cells, cmap=ListedColormap([CARD, "#8a9098", BLUE]), vmax=2, edgecolor=FAINT, lw=0.4)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(edges[-1], edges[0])
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(labels)), labels, rotation=90, **TOKEN_FONT)
    ax.set_yticks(range(len(labels)), labels, **TOKEN_FONT)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    for row in tree.accepted_rows:
        ax.get_xticklabels()[row].set(color=BLUE, weight="bold")
        ax.get_yticklabels()[row].set(color=BLUE, weight="bold")


def draw_slots(ax: Axes, round_: Round) -> None:
    """The KV slots that the round's only request owns, through the phases."""
    (tree,) = round_.requests
    taken, returned = round_.slots_taken, round_.slots_returned
    phases = ["draft", "tree", "verify", "commit", "extend"]
    # When in its phase (of length 1) something happens, and by how much it changes the number.
    changes = [(i + 0.2, taken.get(phase, 0)) for i, phase in enumerate(phases)]
    changes += [(i + 0.7, -returned.get(phase, 0)) for i, phase in enumerate(phases)]
    changes = sorted(change for change in changes if change[1])
    times = [0.0, *(time for time, _ in changes), float(len(phases))]
    owned = np.cumsum([tree.seq_len, *(count for _, count in changes), 0])
    ax.step(times, owned, where="post", color=BLUE, linewidth=2.2)
    for time, before, after in zip(times[1:-1], owned, owned[1:], strict=False):
        ax.annotate(f" {after - before:+d}".replace("-", "−"), (time, (before + after) / 2), va="center", color=INK)
    for border in range(1, len(phases)):
        ax.axvline(border, color=FAINT, linewidth=1, zorder=0)
    ax.set_xlim(0, len(phases))
    ax.set_xticks(np.arange(len(phases)) + 0.5, phases)
    ax.tick_params(axis="x", length=0)
    ax.set_yticks(sorted({int(count) for count in owned}))
    ax.set_ylabel("slots that the request owns")
