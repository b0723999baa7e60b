"""The checks of the study notes on EAGLE, where they speak of commits: which brought what, when, and under which title.

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
from refspec.history.claims.evidence import (
    CommitFacts,
    FileDiff,
    change,
    changes,
    commit,
    definition,
    definitions,
    each,
    exists,
    on_main,
    shelf_of,
    text,
    where,
)
from refspec.history.claims.walk import walk
from refspec.history.clone import Clone, LacksError
from refspec.history.commits import pull_request

FOUR = ("9c05c6898e", "b0524c3789", "ad20b7957e", "815dce0554")
LATER_EIGHT = (
    "8c8779cd05 013021b6a1 f9905d59a8 862dd76c76 9fafa62db7 9fb48f951f e983e43248 b26bc86b36".split()
)  # behind them, what eagle-commits.sh prints
TWELVE = (*FOUR, *LATER_EIGHT)

SCHEDULER = "/python/sglang/srt/managers/scheduler.py"
MODES = "/python/sglang/srt/model_executor/forward_batch_info.py"
MODELS = "/python/sglang/srt/models"
BACKENDS = "/python/sglang/srt/layers/attention"


# --- the four commits


@check("E1")
def four_commits(clone: Clone) -> Sequence[Part]:
    """Four commits between 2024-12-29 and 2025-01-02 brought EAGLE to main."""
    four = each(partial(commit, clone), FOUR)
    days = [day(one) for one in four]
    titles = [title for _, title in _log(clone, f"{four[0].hash}^..{four[-1].hash}")]
    named = [title for title in titles if re.search("eagle", title, re.IGNORECASE)]
    mainline = [one for one in FOUR if on_main(clone, one)]
    model, worker = came_with(clone, FOUR[0], f"{MODELS}/llama_eagle.py"), came_with(clone, FOUR[-1], "eagle_worker.py")
    return [
        Part("the four are on the main line", len(mainline) == 4, f"{len(mainline)} are: {_listed(mainline)}"),
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
            f"their titles have part {_listed([number for found in numbers[1:] for number in found])}",
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
    return [Part("part 4 has the lowest number", numbers[-1] < min(numbers[:-1]), f"in order: {_listed(numbers)}")]


@check("E4")
def when_2150_was_opened(clone: Clone) -> Sequence[Part]:
    """#2150 was opened in November: later than what a lower number reverts, before what a higher one has merged."""
    last = commit(clone, FOUR[-1])
    number = last.pr or 0
    log = _log(clone, last.hash)
    landed = {title: moment for moment, title in log}
    after: list[tuple[datetime, int, str]] = []
    before: list[tuple[datetime, int, str]] = []
    for moment, title in log:
        its_number = pull_request(title) or 0
        if its_number > number:
            before.append((moment, its_number, ""))
        reverted = re.fullmatch(r'Revert "(.*)" \(#\d+\)', title)
        if reverted and 0 < its_number < number:
            after += [
                (then, its_number, one)
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
    model, worker = came_with(clone, FOUR[0], f"{MODELS}/llama_eagle.py"), came_with(clone, FOUR[-1], "eagle_worker.py")
    begun, attended = "3815b23ccb", "f44d143949"
    folder_before = exists(clone, f"{FOUR[0]}^", "")
    folder_begun = came_with(clone, begun, "")
    modes = {one: _members(clone, one, MODES, "ForwardMode") for one in (f"{begun}^", begun, f"{FOUR[0]}^")}
    backend = f"{BACKENDS}/flashinfer_backend.py"
    takes = [
        "is_target_verify" in said for said in each(lambda one: text(clone, one, backend), (f"{attended}^", attended))
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
    short = shelf_of(clone).answer("log", "--no-walk=unsorted", "--abbrev=10", "--format=%h", *hashes).split()
    listed = _catalogued()
    agree = [one for one in twelve if listed.get(one.hash) == (day(one), one.subject)]
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
            f"with --abbrev=10, git prints hashes of {_listed(sorted({len(one) for one in short}))} digits here",
            core=False,
            command=f"git log --no-walk=unsorted --abbrev=10 --date=short --format='%ad  %h  %s' {' '.join(TWELVE)}",
        ),
    ]


@check("E7")
def two_days_of_a_commit(clone: Clone) -> Sequence[Part]:
    """Dates printed are stable facts."""
    twelve = each(partial(commit, clone), TWELVE)
    listed = _catalogued()
    same = [one for one in twelve if listed.get(one.hash, ("",))[0] == day(one)]
    differ = [f"{one.hash[:10]}: {day(one)} and {committed(one)}" for one in twelve if day(one) != committed(one)]
    reach = catalogue.reach().commit
    shelf = shelf_of(clone)
    days = shelf.answer("log", "--format=%as %cs", shelf.resolved(reach[:10]), "--", DIRECTORY).splitlines()
    apart = sum(len(set(line.split())) > 1 for line in days)
    return [
        Part(
            "the author's day stands in the commit, and is the same in every clone",
            len(same) == 12,
            f"{len(same)} of 12 agree with the catalogue's",
        ),
        Part(
            "it is the only day that one may print",
            not differ,
            f"author and committer differ by zone: {'; '.join(differ) or 'nowhere'}; of the folder's {len(days)} "
            f"commits {apart} have two days",
            core=False,
            command=f"git log --format='%as %cs' {reach[:10]} -- {DIRECTORY} | awk '$1 != $2' | wc -l",
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
    graphs = "/python/sglang/srt/model_executor/cuda_graph_runner.py"
    idle = [
        "IDLE" in one.text
        for one in each(lambda one: definition(clone, one, MODES, "ForwardMode.is_cuda_graph"), (before, part_2))
    ]
    asks = [
        "is_cuda_graph" in one.text
        for one in each(lambda one: definition(clone, one, graphs, "CudaGraphRunner.can_run"), (f"{cause}^", cause))
    ]
    tokens = each(lambda one: where(clone, one, graphs, r"raw_num_token = raw_bs \*"), (before, part_2))
    return [
        Part(
            "it changed prepare_dp_attn_batch",
            bodies[0] != bodies[1],
            f"the function is {'the same' if bodies[0] == bodies[1] else 'another'} before and after",
        ),
        Part(
            "idle batches could not replay the graph before, and can after it",
            idle == [False, True] and asks == [False, True],
            f"is_cuda_graph() takes IDLE: {_yes(idle[0])} before, {_yes(idle[1])} after; can_run() asks it: "
            f"{_yes(asks[0])} before {cause}, {_yes(asks[1])} after; the number of tokens is derived from the batch's "
            f"size: {_yes(bool(tokens[0]))} before, {_yes(bool(tokens[1]))} after",
            core=False,
        ),
    ]


@check("E28")
def what_retraction_frees(clone: Clone) -> Sequence[Part]:
    """#2711: retracting must free the tree's slots too."""
    mend = "8c8779cd05"
    facts = commit(clone, mend)
    way = walk(definitions(clone, mend, "eagle_worker.py"), "EAGLEWorker.finish_request", {})
    recorded = "finish_extend_len"
    reads = recorded in definition(clone, mend, "eagle_worker.py", "EAGLEWorker.finish_request").text
    retracts = where(clone, mend, SCHEDULER, r"finish_request\(retracted_reqs\)")
    diff = change(clone, mend, "eagle_utils.py")
    freeing = [line for line in diff.plus if re.search(r"\bfree\w*\(", line)]
    moved = sorted(map(str.strip, diff.plus)) == sorted(map(str.strip, diff.minus))
    return [
        Part(
            "on retraction the draft's slots are freed, by what was recorded",
            facts.pr == 2711 and bool(way.named("free")) and reads and bool(retracts),
            f"at {mend} (#{facts.pr}) the scheduler hands retracted requests to finish_request in line "
            f"{_listed(retracts)}; it calls free {len(way.named('free'))} times, and "
            f"{'reads' if reads else 'does not read'} {recorded}",
        ),
        Part(
            "#2711 adds that freeing",
            bool(freeing),
            f"of {len(diff.plus)} lines added {len(freeing)} free something; "
            f"{'one line was moved, and nothing else' if moved and len(diff.plus) == 1 else 'it is no pure move'}",
            core=False,
        ),
    ]


@check("E29")
def follow_ups(clone: Clone) -> Sequence[Part]:
    """Follow-ups #2711, #2730 (concurrent crash), #2939 (max_tokens=1), #3014 (CPU overhead, flush_cache)."""
    expected = {
        "8c8779cd05": (2711, "retract"),
        "a47bf39123": (2730, "concurrent"),
        "b730aa6b9e": (2939, "max token = 1"),
        "287d07a669": (3014, "flush_cache, CPU overhead"),
    }
    facts = each(partial(commit, clone), expected)
    days = sorted(day(one) for one in facts)
    last = commit(clone, FOUR[-1])
    parts = [
        Part(
            f"#{number} is about {words}", one.pr == number and words in one.subject, f"{one.hash[:10]}: {one.subject}"
        )
        for one, (number, words) in zip(facts, expected.values(), strict=True)
    ]
    later = all(moment(one) > moment(last) for one in facts)
    return [
        *parts,
        Part("they follow the four", later, f"{days[0]} to {days[-1]}; part 4 is of {day(last)}", core=False),
    ]


@check("E30")
def refactoring_3269(clone: Clone) -> Sequence[Part]:
    """#3269: a refactoring, on 2025-02-03."""
    revision, runner = "013021b6a1", "eagle_draft_cuda_graph_runner.py"
    facts = commit(clone, revision)
    new = came_with(clone, revision, runner)
    return [
        _of(facts, 3269, "2025-02-03"),
        Part(
            "it is a refactoring",
            "refactor" in facts.subject,
            f"its title is {facts.subject!r}; {_size(clone, revision)}; {runner} {came(new)} with it",
        ),
    ]


@check("E31")
def kernels_3373(clone: Clone) -> Sequence[Part]:
    """#3373, on 2025-02-07, moves the kernels of the tree's mask to sgl-kernel."""
    revision, kernel = "f9905d59a8", r"__global__ void build_tree"
    before = where(clone, f"{revision}^", "build_eagle_tree.py", kernel)
    after = where(clone, revision, "build_eagle_tree.py", kernel)
    there = "/sgl-kernel/src/sgl-kernel/csrc"
    new = [
        name for name in ("eagle_utils.cu", "speculative_sampling.cu") if came_with(clone, revision, f"{there}/{name}")
    ]
    now = where(clone, revision, f"{there}/eagle_utils.cu", kernel)
    greedy = each(
        lambda one: where(clone, one, "/sgl-kernel/csrc/speculative/eagle_utils.cu", "(?i)verify_?tree_?greedy"),
        ("52a34d7448^", "52a34d7448"),
    )
    return [
        _of(commit(clone, revision), 3373, "2025-02-07"),
        Part(
            "it moves the kernels that build the tree's mask",
            bool(before and now) and not after,
            f"in build_eagle_tree.py there are {len(before)} before and {len(after)} after, in sgl-kernel's "
            f"eagle_utils.cu {len(now)}; new there: {_listed(new)}; kernels of verify_tree_greedy came with 52a34d7448: "
            f"{_yes(bool(greedy[1]) and not greedy[0])}",
        ),
    ]


@check("E32")
def nextn_3582(clone: Clone) -> Sequence[Part]:
    """#3582: NextN, on 2025-02-15."""
    revision = "862dd76c76"
    new = came_with(clone, revision, f"{MODELS}/deepseek_nextn.py")
    return [
        _of(commit(clone, revision), 3582, "2025-02-15"),
        Part("it brought NextN", new, f"models/deepseek_nextn.py {came(new)} with it"),
    ]


@check("E33")
def shared_embeddings_4033(clone: Clone) -> Sequence[Part]:
    """In February 2025 embeddings and head were shared (#4033)."""
    revision, name = "9fafa62db7", "set_embed_and_head"
    facts = commit(clone, revision)
    model = f"{MODELS}/deepseek_v2.py"
    has = [
        any(one.endswith(f".{name}") for one in found)
        for found in each(lambda one: definitions(clone, one, model), (f"{revision}^", revision))
    ]
    return [
        Part(
            "#4033 shares embeddings and head with the target",
            facts.pr == 4033 and has == [False, True],
            f"{revision} is #{facts.pr}; DeepSeek's model, whose kin NextN's is, has {name}: {_yes(has[0])} before it, "
            f"{_yes(has[1])} after",
        ),
        _in_month(facts, "2025-02"),
    ]


@check("E34")
def two_backends(clone: Clone) -> Sequence[Part]:
    """March: FlashInfer MLA (#4218) and FA3 (#4951)."""
    parts = []
    for revision, number, file, name in (
        ("9fb48f951f", 4218, "flashinfer_mla_backend.py", "FlashInferMLAMultiStepDraftBackend"),
        ("e983e43248", 4951, "flashattention_backend.py", "FlashAttentionMultiStepBackend"),
    ):
        facts = commit(clone, revision)
        backend = f"{BACKENDS}/{file}"
        has = [name in found for found in each(partial(_defined, clone, backend), (f"{revision}^", revision))]
        parts += [
            Part(
                f"#{number} lets {file.removesuffix('_backend.py')} draft",
                facts.pr == number and has == [False, True],
                f"{revision} is #{facts.pr}; the backend has {name}: {_yes(has[0])} before it, {_yes(has[1])} after",
            ),
            _in_month(facts, "2025-03"),
        ]
    return parts


@check("E35")
def one_after_another(clone: Clone) -> Sequence[Part]:
    """In March 2025 #4908; overlap, DP attention and PD one after another."""
    pages = commit(clone, "b26bc86b36")
    revisions = {"overlap": "20a6c0a63d", "DP attention": "10d60cd41b", "PD": "d2e0881a34"}
    facts = dict(zip(revisions, each(partial(commit, clone), revisions.values()), strict=True))
    moments = [moment(one) for one in facts.values()]
    return [
        Part(
            "#4908 is of March 2025",
            pages.pr == 4908 and day(pages).startswith("2025-03"),
            f"{pages.hash[:10]} is #{pages.pr}, of {day(pages)}",
        ),
        Part("the three came after it", min(moments) > moment(pages), _listed([day(one) for one in facts.values()])),
        Part(
            "in this order",
            moments == sorted(moments),
            "; ".join(f"{name}: {day(one)} ({one.hash[:10]})" for name, one in facts.items()),
            core=False,
        ),
    ]


# --- of commits


def day(facts: CommitFacts) -> str:
    """The author's day."""
    return facts.author_date[:10]


def committed(facts: CommitFacts) -> str:
    """The committer's day."""
    return facts.committer_date[:10]


def moment(facts: CommitFacts) -> datetime:
    """When it was committed."""
    return datetime.fromisoformat(facts.committer_date)


def came_with(clone: Clone, revision: str, path: str) -> bool:
    """Is the path there since this commit, and not before it?"""
    before, after = each(lambda one: exists(clone, one, path), (f"{revision}^", revision))
    return after and not before


def came(did: bool) -> str:
    """Of something that came, or did not."""
    return "came" if did else "did not come"


def _of(facts: CommitFacts, number: int, on: str) -> Part:
    return Part(
        f"#{number} is of {on}",
        facts.pr == number and day(facts) == on,
        f"{facts.hash[:10]} is #{facts.pr}, of {day(facts)}",
    )


def _in_month(facts: CommitFacts, month: str) -> Part:
    return Part(
        f"that was in {month}",
        day(facts).startswith(month),
        f"it is of {day(facts)}, and was committed on {committed(facts)}",
        core=False,
    )


def _size(clone: Clone, revision: str) -> str:
    try:
        files: Sequence[FileDiff] = changes(clone, revision)
    except LacksError:
        return "how much it changed is not in this clone"
    return f"it adds {sum(len(one.added) for one in files)} lines and removes {sum(len(one.removed) for one in files)}"


def _log(clone: Clone, commits: str) -> list[tuple[datetime, str]]:
    """When each commit was committed, and its title. commits: a hash, for it and all before it, or "hash..hash"."""
    said = shelf_of(clone).answer("log", "-z", "--format=%cI%x00%s", commits)
    fields = said.split("\0")
    return [(datetime.fromisoformat(when), title) for when, title in zip(fields[::2], fields[1::2], strict=False)]


def _catalogued() -> dict[str, tuple[str, str]]:
    """The author's day and the title of each commit that the catalogue knows."""
    known = {one.hash: (one.author_date[:10], one.subject) for one in catalogue.story()}
    return known | {one.hash: (one.author_date[:10], one.subject) for one in catalogue.commits()}


def _defined(clone: Clone, path: str, revision: str) -> set[str]:
    return set(definitions(clone, revision, path))


def _members(clone: Clone, revision: str, path: str, name: str) -> set[str]:
    """The names that are assigned to in a class."""
    body = definition(clone, revision, path, name).node.body
    return {ast.unparse(target) for one in body if isinstance(one, ast.Assign) for target in one.targets}


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
