"""What a terminal shows of a round. It is drawn from a trace alone, so it needs no engine and no torch.

Colour never carries a meaning by itself, and where the terminal's encoding is not UTF-8 plain ASCII does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from refspec.cli.wording import plural
from refspec.trace import Round, Trace, TraceError, TreeRequest

LONGEST_TOKEN = 18  # cells; longer ones are cut
GAP = 3  # cells between what stands side by side
FACTS_WIDTH = 48  # cells that the facts of a round need to stand beside the tree; else they go below


@dataclass(frozen=True)
class Glyphs:
    """The characters that stand for something, in one of two alphabets."""

    accepted: str
    dropped: str
    refused: str
    unreached: str
    bonus: str
    space: str
    ellipsis: str
    seen: str
    unseen: str
    dash: str
    times: str

    @staticmethod
    def of(options: ConsoleOptions) -> Glyphs:
        return ASCII if options.ascii_only else UNICODE


UNICODE = Glyphs("✓", "~", "✗", "·", "★", "␣", "…", "█", "·", "–", "·")
ASCII = Glyphs("+", "~", "x", ".", "*", " ", "...", "#", ".", "-", "*")


class Fate(Enum):
    """What became of a row of the tree: its glyph, its style, and the words for it."""

    ROOT = ("", "bold", "")
    ACCEPTED = ("accepted", "bold green", "accepted")
    DROPPED = ("dropped", "green", "after the end")
    REFUSED = ("refused", "red", "the target chose otherwise")
    UNREACHED = ("unreached", "dim", "never reached")
    BONUS = ("bonus", "bold magenta", "bonus")

    def __init__(self, glyph: str, style: str, meaning: str) -> None:
        self.glyph, self.style, self.meaning = glyph, style, meaning

    def mark(self, glyphs: Glyphs) -> str:
        return getattr(glyphs, self.glyph) if self.glyph else " "


class _WideTree(Tree):
    guide_width = 4


class _NarrowTree(Tree):
    guide_width = 2
    ASCII_GUIDES = ("  ", "| ", "+-", "`-")
    TREE_GUIDES = [("  ", "│ ", "├╴", "└╴")] * 3


class _FlatTree(Tree):
    """For trees too deep to be indented."""

    guide_width = 0
    ASCII_GUIDES = ("", "", "", "")
    TREE_GUIDES = [ASCII_GUIDES] * 3


class RoundView:
    """One request's part of one round."""

    def __init__(self, trace: Trace, round_: Round, tree: TreeRequest) -> None:
        self.trace, self.round, self.tree = trace, round_, tree
        self.tokens = [tree.bonus_token, *(tree.candidates[i].token for i in tree.kept)]
        self.depths = [position - tree.positions[0] for position in tree.positions]
        # Guesses that were looked up have no levels: then it is their longest path that could have been accepted.
        self.topk, self.num_steps = len(tree.draft_slots), max(self.depths)
        if tree.draft_slots:
            self.num_steps = tree.levels
        self.fates = [self._fate(row) for row in range(len(tree.parents))]
        # A stop or the budget may have cut the block that the walk accepted; then the bonus is not in it.
        self.was_cut = len(tree.committed) < len(tree.accepted_rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs, width = Glyphs.of(options), options.max_width
        yield Rule(self._title(glyphs), align="left", style="dim", characters="-" if options.ascii_only else "─")
        yield self._story(glyphs, width)
        yield Text(self._outcome())
        panes = Table.grid(padding=(0, GAP, 0, 0))
        tree, tree_width = self._draw_tree(glyphs, width)
        mask, mask_width = self._draw_mask(glyphs)
        facts = self._facts(glyphs)
        side_by_side: list[Table | Text] = [tree]
        below: list[Table | Text] = []
        panes.add_column(width=tree_width)
        room = width - tree_width - GAP
        if mask_width <= room:
            side_by_side.append(mask)
            panes.add_column(width=mask_width)
            room -= mask_width + GAP
        elif mask_width <= width:
            below.append(mask)
        if room >= FACTS_WIDTH:
            side_by_side.append(facts)
            panes.add_column(width=room)
        else:
            below.append(facts)
        panes.add_row(*side_by_side)
        yield panes
        yield self._legend(glyphs)
        for part in below:
            yield Text()
            yield part

    def _fate(self, row: int) -> Fate:
        path = self.tree.accepted_rows
        if row == 0:
            return Fate.ROOT
        if row in path:
            return Fate.ACCEPTED if path.index(row) <= len(self.tree.committed) else Fate.DROPPED
        return Fate.REFUSED if self.tree.parents[row] in path else Fate.UNREACHED

    # --- above the tree -----------------------------------------------------------------------------------------

    def _title(self, glyphs: Glyphs) -> Text:
        first, last = self.trace.rounds[0].number, self.trace.rounds[-1].number
        return Text.assemble(
            (f"round {self.round.number}", "bold"),
            f" of {first}{glyphs.dash}{last}, request {self.tree.request}, {self.tree.seq_len} tokens in the cache",
        )

    def _story(self, glyphs: Glyphs, width: int) -> Text:
        """The text before the round, as far back as a line holds it, and in brackets what the round brought."""
        output = self.trace.outputs[self.tree.request]
        before = (output.prompt_ids + output.token_ids)[: self.tree.seq_len + 1]  # the root is not in the cache yet
        new = shortened(self._joined(self.tree.committed, glyphs), width // 2, glyphs)
        old = shortened(self._joined(before, glyphs), width - cell_len(new) - 2, glyphs, keep_end=True)
        return Text.assemble((old, "dim"), "[", (new, "bold green"), "]", no_wrap=True)

    def _outcome(self) -> str:
        accepted, committed = len(self.tree.accepted_rows) - 1, len(self.tree.committed)
        outcome = f"{accepted} of at most {self.num_steps} drafts accepted"
        ended = f"the request ended ({self.tree.finish_reason})"
        if self.was_cut:
            return f"{outcome}; {ended} at token {committed} of these {accepted + 1}"
        outcome += f" + the bonus = {plural(committed, 'token')}"
        return f"{outcome}; {ended}" if self.tree.finish_reason else outcome

    # --- the tree and its mask ----------------------------------------------------------------------------------

    def _draw_tree(self, glyphs: Glyphs, width: int) -> tuple[Table, int]:
        """The tree, and the cells that it takes across."""
        end_of_path = self.tree.accepted_rows[-1]
        bonus_depth = self.depths[end_of_path] + 1
        deepest = max(*self.depths, 0 if self.was_cut else bonus_depth)
        shown = [self._shown(token, glyphs) for token in [*self.tokens, self.tree.committed[-1]]]
        token_width = min(max(map(cell_len, shown)), LONGEST_TOKEN)
        numbers_from = 6 + token_width  # in an unindented label: mark, row, token and the spaces between
        kinds = (kind for kind in (_WideTree, _NarrowTree) if kind.guide_width * deepest + numbers_from + 12 <= width)
        kind = next(kinds, _FlatTree)
        flat = kind is _FlatTree  # then the level is given as a number
        numbers_from += 4 if flat else kind.guide_width * deepest

        def label(fate: Fate, row: str, token: str, depth: int, numbers: str) -> Text:
            start = f"{depth:>3} " if flat else ""
            start += f"{fate.mark(glyphs)} {row:>2} {shortened(token, token_width, glyphs)}"
            return Text(set_cell_size(start, numbers_from - kind.guide_width * depth) + numbers, style=fate.style)

        labels = [
            label(fate, str(row), token, depth, self._odds(row))
            for row, (fate, token, depth) in enumerate(zip(self.fates, shown, self.depths, strict=False))
        ]
        bonus_note = "" if self.was_cut else self._bonus_note()
        nodes: list[Tree] = []
        for row, text in enumerate(labels):
            nodes.append(nodes[self.tree.parents[row]].add(text) if row else kind(text, guide_style="dim"))
            if row == end_of_path and not self.was_cut:  # before the drafts that it was preferred to
                nodes[row].add(label(Fate.BONUS, "", shown[-1], bonus_depth, bonus_note))

        heads = set_cell_size("lvl   row token" if flat else "  row token", numbers_from)
        heads += " step  path" if self.topk else ""
        drawn_width = numbers_from + max(11, cell_len(bonus_note))
        drawn = Table.grid()
        drawn.add_column(width=drawn_width)
        drawn.add_row(Text(heads, style="dim"))
        drawn.add_row(nodes[0])
        return drawn, drawn_width

    def _odds(self, row: int) -> str:
        """The draft's probability of the step to this row, and of the whole path; nothing for the root, or a guess that
        was looked up.
        """
        if row == 0:
            return ""
        candidate = self.tree.candidates[self.tree.kept[row - 1]]
        if candidate.score is None:
            return ""
        before = self.tree.candidates[candidate.parent].score if candidate.parent >= 0 else 1.0
        return f"{probability(candidate.score / before) if before else '?':>5} {probability(candidate.score):>5}"

    def _bonus_note(self) -> str:
        """Why the target's own token was not accepted as a draft instead."""
        end_of_path = self.tree.accepted_rows[-1]
        if self.depths[end_of_path] == self.num_steps > 0:
            return "past the drafts"
        parent = self.tree.kept[end_of_path - 1] if end_of_path else -1
        for candidate in self.tree.candidates:
            same = (candidate.parent, candidate.token) == (parent, self.tree.committed[-1])
            if same and candidate.score is not None:
                return f"not kept: {probability(candidate.score)}"
        return "not drafted"

    def _draw_mask(self, glyphs: Glyphs) -> tuple[Text, int]:
        """The tree mask, one cell for each pair: the row attends the column. And the cells it takes across."""
        rows = len(self.tree.tree_mask)
        mask = Text(no_wrap=True)
        mask.append("row " + "".join(str(column % 10) for column in range(rows)), style="dim")
        for row, (fate, bits) in enumerate(zip(self.fates, self.tree.tree_mask, strict=True)):
            cells = bits.replace("1", glyphs.seen).replace("0", glyphs.unseen)
            style = fate.style if fate in (Fate.ROOT, Fate.ACCEPTED, Fate.DROPPED) else ""
            mask.append("\n").append(f"{row:>3} ", style="dim").append(cells, style=style)
        return mask, 4 + rows

    def _legend(self, glyphs: Glyphs) -> Text:
        fates = [*self.fates] if self.was_cut else [*self.fates, Fate.BONUS]
        marks = [f"{fate.mark(glyphs)} {fate.meaning}" for fate in Fate if fate in fates and fate.glyph]
        return Text("  ".join(marks), style="dim")

    # --- the facts ----------------------------------------------------------------------------------------------

    def _facts(self, glyphs: Glyphs) -> Table:
        tree, k, steps = self.tree, self.topk, self.num_steps
        scored = f"{len(tree.candidates)} scored = {k}" + (f" + {steps - 1}{glyphs.times}{k * k}" if steps > 1 else "")
        drafted = [slot for branch in tree.draft_slots for slot in branch]
        not_kept = sorted(set(tree.verify_slots) - set(tree.kept_slots))
        # With pages and k > 1 the kept rows' keys and values change places: see `refspec.spec.commit.compact`.
        moved = tree.kept_slots != [tree.verify_slots[row] for row in tree.accepted_rows[: len(tree.kept_slots)]]
        whole_batch = ", for the whole batch" if len(self.round.requests) > 1 else ""
        facts = Table.grid(padding=(0, 2, 0, 0))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column()
        if tree.draft_slots:
            facts.add_row("candidates", f"{scored}, {len(tree.kept)} kept")
        else:
            facts.add_row("candidates", f"{len(tree.candidates)} looked up, all kept")
        if drafted:
            facts.add_row("draft slots", f"{len(drafted)}, until verify: {ranges(drafted, glyphs)}")
        facts.add_row("verify slots", f"{len(tree.verify_slots)}: {ranges(tree.verify_slots, glyphs)}")
        kept = f"{len(tree.kept_slots)} kept" + (", moved to the front" if moved else "")
        facts.add_row("", f"{kept}: {ranges(tree.kept_slots, glyphs)}")
        facts.add_row("", f"{len(not_kept)} not kept: {ranges(not_kept, glyphs)}" if not_kept else "all kept")
        # Whole pages. What lies in a page with committed tokens is not taken, and cannot be given back.
        taken, returned = (counts(slots) or "none" for slots in (self.round.slots_taken, self.round.slots_returned))
        facts.add_row("pool", f"taken: {taken}{whole_batch}")
        facts.add_row("", f"given back: {returned}")
        facts.add_row("forwards", counts(self.round.forwards) + whole_batch)
        facts.add_row("launches", counts(self.round.launches))
        return facts

    # --- tokens -------------------------------------------------------------------------------------------------

    def _joined(self, tokens: Sequence[int], glyphs: Glyphs) -> str:
        return "".join(escaped(self.trace.vocabulary.get(token, f"<{token}>"), glyphs) for token in tokens)

    def _shown(self, token: int, glyphs: Glyphs) -> str:
        text = self.trace.vocabulary.get(token)
        if text is None or "\ufffd" in text:  # no text, or bytes that are no character by themselves
            return f"<{token}>"
        quote = '"' if "'" in text and '"' not in text else "'"
        return f"{quote}{escaped(text, glyphs)}{quote}"


def round_views(trace: Trace, request: int | None = None) -> list[list[RoundView]]:
    """For each round its requests' views; of one request only where `request` names it.

    Raises TraceError when the trace refers to rows, candidates or outputs that it does not hold.
    """
    views = []
    for round_ in trace.rounds:
        chosen = [tree for tree in round_.requests if request is None or tree.request == request]
        for tree in chosen:
            _check(trace, round_, tree)
        if chosen:
            views.append([RoundView(trace, round_, tree) for tree in chosen])
    return views


def _check(trace: Trace, round_: Round, tree: TreeRequest) -> None:
    """Whatever a RoundView looks up must be there: a trace comes from a file, and a file can be anything."""
    rows, pool = len(tree.parents), len(tree.candidates)
    sound = (
        rows >= 1
        and len(tree.kept) == rows - 1
        and len(tree.positions) == len(tree.tree_mask) == rows
        and all(0 <= i < pool for i in tree.kept)
        and all(-1 <= candidate.parent < i for i, candidate in enumerate(tree.candidates))
        and all(0 <= parent < row for row, parent in enumerate(tree.parents) if row)
        and tree.accepted_rows[:1] == [0]
        and all(0 <= row < rows for row in tree.accepted_rows)
        and 1 <= len(tree.committed) <= len(tree.accepted_rows)
        and all((candidate.score is None) == (tree.draft_slots == []) for candidate in tree.candidates)
        and 0 <= tree.request < len(trace.outputs)
    )
    if not sound:
        raise TraceError(f"the trace contradicts itself in round {round_.number}, request {tree.request}")


def escaped(text: str, glyphs: Glyphs) -> str:
    """Text on one line, every character of it visible."""
    show = ascii if glyphs is ASCII else repr
    return "".join(show(character)[1:-1] for character in text).replace(" ", glyphs.space)


def shortened(text: str, width: int, glyphs: Glyphs, keep_end: bool = False) -> str:
    """Text cut to `width` cells, with an ellipsis where something is missing."""
    if cell_len(text) <= width:
        return text
    room = max(width - cell_len(glyphs.ellipsis), 0)
    if not room:
        return glyphs.ellipsis[:width]
    if keep_end:
        return glyphs.ellipsis + chop_cells(text[::-1], room)[0][::-1]
    return chop_cells(text, room)[0] + glyphs.ellipsis


def probability(p: float) -> str:
    """In five characters."""
    return "<.001" if 0 < p < 0.0005 else f"{p:.3f}"


def ranges(numbers: Sequence[int], glyphs: Glyphs) -> str:
    """1 2 3 7 as 1–3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}{glyphs.dash}{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def counts(of: dict[str, int]) -> str:
    """name=count, with commas between."""
    return ", ".join(f"{name}={count}" for name, count in of.items())
