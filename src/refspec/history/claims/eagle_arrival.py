"""The checks of the study notes on EAGLE, where they speak of the commits that brought it.

Days are the author's own unless a part says otherwise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial

from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY
from refspec.history.claims.checking import Part, check
from refspec.history.claims.eagle_commits import FOUR, came, came_with, yes
from refspec.history.claims.evidence import change, commit, definition, each, exists, on_main, shelf_of, text, where
from refspec.history.claims.wording import committed, day, listed
from refspec.history.clone import Clone, LacksError
from refspec.history.commits import pull_request

TWELVE = (  # what eagle-commits.sh prints
    *FOUR,
    *"8c8779cd05 013021b6a1 f9905d59a8 862dd76c76 9fafa62db7 9fb48f951f e983e43248 b26bc86b36".split(),
)
SCHEDULER = "/python/sglang/srt/managers/scheduler.py"
MODES = "/python/sglang/srt/model_executor/forward_batch_info.py"
GRAPHS = "/python/sglang/srt/model_executor/cuda_graph_runner.py"
LLAMA = "/python/sglang/srt/models/llama_eagle.py"
BACKEND = "/python/sglang/srt/layers/attention/flashinfer_backend.py"


# --- the four commits


@check("E1")
def four_commits(clone: Clone) -> Sequence[Part]:
    """Four commits between 2024-12-29 and 2025-01-02 brought EAGLE to main."""
    four = each(partial(commit, clone), FOUR)
    days = [day(one) for one in four]
    titles = [title for _, title in _log(clone, f"{shelf_of(clone).resolved(f'{FOUR[0]}^')}..{four[-1].hash}")]
    named = [title for title in titles if re.search("eagle", title, re.IGNORECASE)]
    mainline = [one for one in FOUR if on_main(clone, one)]
    model, worker = came_with(clone, FOUR[0], LLAMA), came_with(clone, FOUR[-1], "eagle_worker.py")
    return [
        Part("the four are on the main line", len(mainline) == 4, f"{len(mainline)} are: {listed(mainline)}"),
        Part(
            "they are from 2024-12-29 to 2025-01-02",
            (min(days), max(days)) == ("2024-12-29", "2025-01-02"),
            f"{min(days)} to {max(days)}",
        ),
        Part(
            "they brought EAGLE, from its model to its worker",
            model and worker,
            f"llama_eagle.py {came(model)} with {FOUR[0]}, eagle_worker.py {came(worker)} with {FOUR[-1]}",
        ),
        Part(
            "no other commit from the first to the last has EAGLE in its title",
            len(named) == 4,
            f"of {len(titles)} titles, {len(named)} have",
            core=False,
            command=f"git log --format='%h %as %s' '{FOUR[0]}^..{FOUR[-1]}'",
        ),
    ]


@check("E2")
def titles_by_part(clone: Clone) -> Sequence[Part]:
    """The four are titled part 1 to part 4."""
    four = each(partial(commit, clone), FOUR)
    numbers = [re.findall(r"\bpart (\d+)\b", one.subject, re.IGNORECASE) for one in four]
    return [
        Part(
            "the last three are titled part 2 to part 4",
            numbers[1:] == [["2"], ["3"], ["4"]],
            f"their titles have part {listed([number for found in numbers[1:] for number in found])}",
        ),
        Part(
            "the first is titled part 1",
            numbers[0] == ["1"],
            f"its title is {four[0].subject!r}; what follows the title has "
            f"{'a part' if re.search(r'part', four[0].body, re.IGNORECASE) else 'no part either'}",
            core=False,
        ),
    ]


@check("E3")
def number_of_part_4(clone: Clone) -> Sequence[Part]:
    """The number of part 4's pull request is lower than those of the other three."""
    numbers = [one.pr or 0 for one in each(partial(commit, clone), FOUR)]
    return [Part("part 4 has the lowest number", 0 < numbers[-1] < min(numbers[:-1]), f"in order: {listed(numbers)}")]


@check("E4")
def when_2150_was_opened(clone: Clone) -> Sequence[Part]:
    """#2150 was opened in November: later than what a lower number reverts, before what a higher one has merged."""
    last = commit(clone, FOUR[-1])
    number = last.pr or 0
    log = _log(clone, last.hash)
    landed = {title: moment for moment, title in log}
    after: list[tuple[datetime, int]] = []
    before: list[tuple[datetime, int]] = []
    for moment, title in log:
        its_number = pull_request(title) or 0
        if its_number > number:
            before.append((moment, its_number))
        reverted = re.fullmatch(r'Revert "(.*)" \(#\d+\)', title)
        if reverted and 0 < its_number < number:
            after += [
                (then, its_number)
                for one, then in landed.items()
                if one.startswith(f"{reverted[1]} (#") and then < moment
            ]
    if not (after and before):
        raise LacksError(f"this clone does not tell when #{number} was opened{clone.remedy()}")
    first, last_day = max(after), min(before)
    return [
        Part(
            "#2150 was opened in November 2024",
            number == 2150 and first[0].strftime("%Y-%m") == last_day[0].strftime("%Y-%m") == "2024-11",
            f"numbers rise as pull requests are opened: #{first[1]} reverts what landed on {first[0]:%Y-%m-%d}, "
            f"#{last_day[1]} landed on {last_day[0]:%Y-%m-%d}, and #{number} lies between them",
            command=f"git log --format='%cs %s' {FOUR[-1]} | grep -E '#({first[1]}|{last_day[1]})[^0-9]'",
        )
    ]


@check("E5")
def who_laid_the_ground(clone: Clone) -> Sequence[Part]:
    """Only these four laid the ground."""
    model, worker = came_with(clone, FOUR[0], LLAMA), came_with(clone, FOUR[-1], "eagle_worker.py")
    begun, attended = "3815b23ccb", "f44d143949"
    folder_before = exists(clone, f"{FOUR[0]}^", "")
    folder_begun = came_with(clone, begun, "")
    modes = {one: _members(clone, one, MODES, "ForwardMode") for one in (f"{begun}^", begun, f"{FOUR[0]}^")}
    takes = [
        "is_target_verify" in said for said in each(lambda one: text(clone, one, BACKEND), (f"{attended}^", attended))
    ]
    mode = "TARGET_VERIFY"
    return [
        Part(
            "they brought the model and the worker",
            model and worker,
            f"llama_eagle.py {came(model)} with {FOUR[0]}, eagle_worker.py {came(worker)} with {FOUR[-1]}",
        ),
        Part(
            "the folder came with them",
            not folder_before,
            f"{DIRECTORY} {'is' if folder_before else 'is not'} there before them, and {came(folder_begun)} with "
            f"{begun} (#{commit(clone, begun).pr})",
            core=False,
        ),
        Part(
            "verification by the target came with them",
            mode not in modes[f"{FOUR[0]}^"] and takes != [False, True],
            f"ForwardMode.{mode} {came(mode in modes[begun] and mode not in modes[f'{begun}^'])} with {begun}, and "
            f"flashinfer's backend {'began' if takes == [False, True] else 'did not begin'} to heed it with {attended} "
            f"(#{commit(clone, attended).pr})",
            core=False,
        ),
    ]


# --- the twelve lines


@check("E6")
def twelve_lines(clone: Clone) -> Sequence[Part]:
    """What eagle-commits.sh prints: twelve lines of day, hash and title."""
    twelve = each(partial(commit, clone), TWELVE)
    mainline = [one for one in TWELVE if on_main(clone, one)]
    hashes = [one.hash for one in twelve]
    short = (
        shelf_of(clone)
        .answer("log", "--no-mailmap", "--no-walk=unsorted", "--abbrev=10", "--format=%h", *hashes)
        .split()
    )
    known = _catalogued()
    agree = [one for one in twelve if known.get(one.hash) == (day(one), one.subject)]
    return [
        Part("the twelve are on the main line", len(mainline) == 12, f"{len(mainline)} are"),
        Part(
            "days and titles are those of the commits",
            len(agree) == 12,
            f"{len(agree)} agree with what the catalogue holds of them",
        ),
        Part(
            "ten digits name each",
            [len(one) for one in short] == [10] * 12,
            f"with --abbrev=10, git prints hashes of {listed(sorted({len(one) for one in short}))} digits here",
            core=False,
            command=f"git log --no-walk=unsorted --abbrev=10 --date=short --format='%ad  %h  %s' {' '.join(TWELVE)}",
        ),
    ]


@check("E7")
def two_days_of_a_commit(clone: Clone) -> Sequence[Part]:
    """Dates printed are stable facts."""
    twelve = each(partial(commit, clone), TWELVE)
    known = _catalogued()
    same = [one for one in twelve if known.get(one.hash, ("",))[0] == day(one)]
    differ = [f"{one.hash[:10]}: {day(one)} and {committed(one)}" for one in twelve if day(one) != committed(one)]
    reach = catalogue.reach().commit
    shelf = shelf_of(clone)
    until = shelf.resolved(reach[:10])
    try:
        days = shelf.answer("log", "--no-mailmap", "--format=%as %cs", until, "--", DIRECTORY).splitlines()
        apart = sum(len(set(line.split())) > 1 for line in days)
        all_of_them = f"of the folder's {len(days)} commits {apart} have two days"
    except LacksError:
        all_of_them = "which commits are the folder's, this clone does not tell"
    return [
        Part(
            "the author's day stands in the commit, and is the same in every clone",
            len(same) == 12,
            f"{len(same)} of 12 agree with the catalogue's",
        ),
        Part(
            "it is the only day that one may print",
            not differ,
            f"author and committer differ by zone: {'; '.join(differ) or 'nowhere'}; {all_of_them}",
            core=False,
            command=f"git log --format='%as %cs' {reach[:10]} -- :/{DIRECTORY} | awk '$1 != $2' | wc -l",
        ),
    ]


# --- what single commits changed


@check("E14")
def what_part_3_changed(clone: Clone) -> Sequence[Part]:
    """Part 3 changed exactly the spots that handle several tokens, as seq_lens and streaming by accept count."""
    diff = change(clone, FOUR[2], SCHEDULER)
    both = [*diff.plus, *diff.minus]
    spots = [line for line in diff.plus if "output_ids" in line or "multiplier" in line]
    named = {word: sum(word in line for line in both) for word in ("seq_lens", "stream", "accept")}
    others = [line for line in diff.plus if line.strip() and "draft_worker" in line]
    return [
        Part(
            "it changed spots that handle several tokens",
            bool(spots),
            f"in the scheduler {len(spots)} of the lines added are about output_ids or room for several tokens",
        ),
        Part(
            "seq_lens and streaming by accept count are among them",
            named["seq_lens"] > 0 and named["stream"] + named["accept"] > 0,
            "changed lines that speak of " + ", ".join(f"{word}: {count}" for word, count in named.items()),
            core=False,
        ),
        Part(
            "it changed nothing else",
            not others,
            f"{len(others)} of the lines added are about draft_worker, of {len(diff.plus)} added",
            core=False,
        ),
    ]


@check("E43")
def what_part_2_mended(clone: Clone) -> Sequence[Part]:
    """Part 2 mended a hang that came of different numbers of tokens, in prepare_dp_attn_batch."""
    part_2, before, cause = FOUR[1], f"{FOUR[1]}^", "f44d143949"
    name = "Scheduler.prepare_dp_attn_batch"
    bodies = each(lambda one: definition(clone, one, SCHEDULER, name).text, (before, part_2))
    idle = [
        "IDLE" in one.text
        for one in each(lambda one: definition(clone, one, MODES, "ForwardMode.is_cuda_graph"), (before, part_2))
    ]
    asks = [
        "is_cuda_graph" in one.text
        for one in each(lambda one: definition(clone, one, GRAPHS, "CudaGraphRunner.can_run"), (f"{cause}^", cause))
    ]
    tokens = each(lambda one: where(clone, one, GRAPHS, r"raw_num_token = raw_bs \*"), (before, part_2))
    return [
        Part(
            "it changed prepare_dp_attn_batch",
            bodies[0] != bodies[1],
            f"the function is {'the same' if bodies[0] == bodies[1] else 'another'} before and after",
        ),
        Part(
            "idle batches could not replay the graph before, and can after it",
            idle == [False, True] and asks == [False, True],
            f"is_cuda_graph() takes IDLE: {yes(idle[0])} before, {yes(idle[1])} after; can_run() asks it: "
            f"{yes(asks[0])} before {cause}, {yes(asks[1])} after; the number of tokens is derived from the batch's "
            f"size: {yes(bool(tokens[0]))} before, {yes(bool(tokens[1]))} after",
            core=False,
        ),
    ]


# --- of many commits


def _log(clone: Clone, commits: str) -> list[tuple[datetime, str]]:
    """When each commit was committed, and its title. commits: a hash, for it and all before it, or "hash..hash"."""
    said = shelf_of(clone).answer("log", "-z", "--no-mailmap", "--format=%cI%x00%s", commits)
    fields = said.split("\0")
    return [(datetime.fromisoformat(when), title) for when, title in zip(fields[::2], fields[1::2], strict=False)]


def _catalogued() -> dict[str, tuple[str, str]]:
    """The author's day and the title of each commit that the catalogue knows."""
    known = {one.hash: (one.author_date[:10], one.subject) for one in catalogue.story()}
    return known | {one.hash: (one.author_date[:10], one.subject) for one in catalogue.commits()}


def _members(clone: Clone, revision: str, path: str, name: str) -> set[str]:
    """The names that are assigned to in a class."""
    body = definition(clone, revision, path, name).node.body
    return {ast.unparse(target) for one in body if isinstance(one, ast.Assign) for target in one.targets}
