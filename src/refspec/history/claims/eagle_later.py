"""The checks of the study notes on EAGLE, where they speak of the folder: what it held, and what came into it later."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial

from refspec.history import catalogue
from refspec.history.claims.checking import Finding, Part, check, verdict_of
from refspec.history.claims.eagle_commits import came, came_with, yes
from refspec.history.claims.evidence import (
    Defined,
    commit,
    definition,
    definitions,
    each,
    exists,
    files,
    lines,
    shelf_of,
)
from refspec.history.claims.wording import day
from refspec.history.clone import Clone, LacksError

BASE = "29f6d408c0"  # the commit that the notes are about
MAIN = catalogue.reach().commit[:10]  # how far the catalogue knows the main line
WORKER = "eagle_worker.py"


# --- how many files


@check("E8")
def files_of_two_releases(clone: Clone) -> Sequence[Part]:
    """spec-dir.sh prints 5 files, 1 worker of v0.4.6, and 6 and 1 of v0.5.0rc0."""
    parts = []
    for version, numbers in (("0.4.6", (5, 1)), ("0.5.0rc0", (6, 1))):
        names = _python(files(clone, f"v{version}"))
        wheel = sorted(catalogue.wheels().get(version, {}))
        parts += [
            Part(
                f"v{version} has {_counted(numbers)}", _numbers(names) == numbers, f"it has {_counted(_numbers(names))}"
            ),
            Part(
                f"the published wheel {version} has the same",
                names == wheel,
                f"by the catalogue's list of wheels it has {_counted(_numbers(wheel))}; "
                f"{'the same names' if names == wheel else 'other names'}",
                core=False,
            ),
        ]
    return parts


@check("E9")
def files_of_the_base(clone: Clone) -> Sequence[Part] | Finding:
    """spec-dir.sh prints 62 files and 11 workers of 29f6d408c0."""
    wheels = {version: _numbers(list(names)) for version, names in catalogue.wheels().items()}
    near = "; ".join(f"{version}: {_counted(counts)}" for version, counts in wheels.items() if counts[0] >= 60)
    if shelf_of(clone).known(BASE):
        numbers = _numbers(files(clone, BASE))
        return [Part(f"{BASE} has {_counted((62, 11))}", numbers == (62, 11), f"it has {_counted(numbers)}")]
    now = _numbers(files(clone, MAIN))
    if clone.is_shallow:
        raise LacksError(f"this clone lacks the commit {BASE}{clone.remedy()}")
    return Finding(
        "not checkable in git",
        note=f"the clone has no commit {BASE}; at {MAIN}, of {catalogue.reach().date}, the main line has "
        f"{_counted(now)}; published wheels by the catalogue: {near}",
    )


@check("E10")
def methods_of_the_base(clone: Clone) -> Sequence[Part] | Finding:
    """The base commit contains the methods dflash, uno and dspark."""
    methods = ("dflash", "uno", "dspark")
    since = {"dflash": ("f08726fd56", "dflash_worker.py"), "dspark": ("6cc9352dfe", "dspark_components")}
    history = []
    for method, (revision, path) in since.items():
        there = came_with(clone, revision, path)
        history.append(f"{method}: {path} {came(there)} with {revision} on {day(commit(clone, revision))}")
    if shelf_of(clone).known(BASE):
        names = files(clone, BASE)
        held = [method for method in methods if _of_method(names, method)]
        return [Part(f"{BASE} has files of all three", held == list(methods), f"of {', '.join(held) or 'none'}")]
    wheels = catalogue.wheels()
    with_all = [version for version in wheels if all(_of_method(wheels[version], method) for method in methods)]
    around = _around(62)
    parts = [
        Part(
            "the wheels next to it have files of all three",
            bool(around) and set(around) <= set(with_all),
            f"by the catalogue: {', '.join(around)} are the wheels next to 62 files; with all three: "
            f"{', '.join(with_all) or 'none'}; {'; '.join(history)}",
        )
    ]
    return Finding(
        f"{verdict_of(parts)} (wheels)",
        tuple(parts),
        f"the clone has no commit {BASE}: wheels stand in for it",
    )


@check("E11")
def five_files(clone: Clone) -> Sequence[Part]:
    """v0.4.6 has five files in speculative/."""
    names = _python(files(clone, "v0.4.6"))
    return [Part("v0.4.6 has five files", len(names) == 5, f"it has {len(names)}: {', '.join(names)}")]


@check("E36")
def lines_at_the_start(clone: Clone) -> Sequence[Part]:
    """The worker had 655 lines at the start."""
    revisions = ("815dce0554", "013021b6a1", "b26bc86b36", "v0.4.6", "v0.5.0rc0", "28c1a3cb45^")
    counts = dict(zip(revisions, each(lambda one: len(lines(clone, one, WORKER)), revisions), strict=True))
    gone = not exists(clone, "28c1a3cb45", WORKER)
    return [
        Part(
            "it began with 655 lines",
            counts["815dce0554"] == 655,
            "; ".join(f"{revision}: {count}" for revision, count in counts.items())
            + f"; {'gone' if gone else 'still there'} at 28c1a3cb45",
        )
    ]


# --- what came later


@check("E37")
def second_version(clone: Clone) -> Sequence[Part]:
    """Second half of 2025: eagle_worker_v2 and base_spec_worker."""
    return [
        *_came_in_2025(clone, "20a6c0a63d", "eagle_worker_v2.py"),
        *_came_in_2025(clone, "cde5a6e30f", "base_spec_worker.py"),
    ]


@check("E38")
def registry_of_2025(clone: Clone) -> Sequence[Part]:
    """Second half of 2025: spec_registry.py makes methods pluggable."""
    return _came_in_2025(clone, "95fb722dd2", "spec_registry.py")


@check("E39")
def names_in_the_registry(clone: Clone) -> Sequence[Part]:
    """The registered names of the built-in methods can be read in spec_registry.py."""
    members = definition(clone, MAIN, "spec_info.py", "SpeculativeAlgorithm").node.body
    built_in = {ast.unparse(target) for one in members if isinstance(one, ast.Assign) for target in one.targets}
    built_in -= {"NONE"}
    registry = definitions(clone, MAIN, "spec_registry.py")
    said = ast.parse("\n".join(lines(clone, MAIN, "spec_registry.py")))
    strings = {node.value for node in ast.walk(said) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = sorted(built_in & strings)
    return [
        Part(
            "spec_registry.py names the built-in methods",
            bool(built_in) and set(named) == built_in,
            f"at {MAIN} it names {len(named)} of the {len(built_in)} members of SpeculativeAlgorithm, an enum in "
            f"spec_info.py ({', '.join(sorted(built_in))}); what it registers is a "
            f"{next((name for name in registry if '.' not in name and name[0].isupper()), 'thing')} of a plugin's",
        )
    ]


@check("E40")
def ngram(clone: Clone) -> Sequence[Part]:
    """Second half of 2025: ngram_worker, with matching in C++."""
    first, renamed, moved = "e7bc600304", "24f7cb1ece", "9d9537fbd3"
    new = came_with(clone, renamed, "ngram_worker.py")
    source = came_with(clone, first, "cpp_lookahead/lookahead.cpp")
    left = each(lambda one: any(name.endswith(".cpp") for name in files(clone, one)), (f"{moved}^", moved))
    return [
        *_came_in_2025(clone, first, "lookahead_worker.py"),
        Part(
            "it became ngram_worker",
            new and _second_half(day(commit(clone, renamed))),
            f"ngram_worker.py {came(new)} with {renamed} on {day(commit(clone, renamed))}",
        ),
        Part(
            "its matching is in C++",
            source,
            f"cpp_lookahead/lookahead.cpp {came(source)} with {first}; the folder has C++ before {moved}: "
            f"{yes(left[0])}, after: {yes(left[1])}",
        ),
    ]


@check("E41")
def standalone(clone: Clone) -> Sequence[Part]:
    """Second half of 2025: standalone_worker_v2."""
    older = "8cda5a622c"
    first = came_with(clone, older, "standalone_worker.py")
    (part,) = _came_in_2025(clone, "7518dc3532", "standalone_worker_v2.py")
    found = f"{part.found}; standalone_worker.py {came(first)} with {older} on {day(commit(clone, older))}"
    return [Part(part.says, part.holds, found)]


@check("E42")
def one_interface(clone: Clone) -> Sequence[Part]:
    """All methods attach through one interface of workers."""
    create = definition(clone, MAIN, "spec_info.py", "SpeculativeAlgorithm.create_worker").node
    workers = {ast.unparse(node.value) for node in ast.walk(create) if isinstance(node, ast.Return) and node.value}
    modules = [name for name in files(clone, MAIN) if name.endswith(".py") and "worker" in name.rsplit("/", 1)[-1]]
    classes: dict[str, Defined] = {}
    for found in each(partial(definitions, clone, MAIN), modules):
        classes |= {name: one for name, one in found.items() if isinstance(one.node, ast.ClassDef)}
    others = sorted(worker for worker in workers if "BaseSpecWorker" not in _ancestors(worker, classes))
    return [
        Part(
            "every worker that a method can have derives from BaseSpecWorker",
            bool(workers) and not others,
            f"at {MAIN}, of {len(workers)} workers ({', '.join(sorted(workers))}) {len(workers) - len(others)} do"
            + (f"; not {', '.join(others)}" if others else ""),
        )
    ]


def _came_in_2025(clone: Clone, revision: str, path: str) -> list[Part]:
    new, on = came_with(clone, revision, path), day(commit(clone, revision))
    return [
        Part(
            f"{path} came in the second half of 2025",
            new and _second_half(on),
            f"it {came(new)} with {revision}, which is of {on}",
        )
    ]


def _second_half(on: str) -> bool:
    return "2025-07-01" <= on <= "2025-12-31"


def _python(names: Sequence[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(".py"))


def _numbers(names: Sequence[str]) -> tuple[int, int]:
    """How many Python files there are, and how many with worker in their names."""
    python = _python(names)
    return len(python), sum("worker" in name.rsplit("/", 1)[-1] for name in python)


def _counted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]} files, {numbers[1]} of them workers"


def _of_method(names: Sequence[str] | dict[str, int], method: str) -> bool:
    return any(name.startswith(f"{method}_") for name in names)


def _around(count: int) -> list[str]:
    """The published wheels whose numbers of files are next to a number, below and above it."""
    sizes = {version: len(_python(list(names))) for version, names in catalogue.wheels().items()}
    below = max((size for size in sizes.values() if size <= count), default=0)
    above = min((size for size in sizes.values() if size >= count), default=0)
    return [version for version, size in sizes.items() if size in (below, above)]


def _ancestors(name: str, classes: dict[str, Defined]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in classes and one not in found:
            waiting += classes[one].bases
        found.add(one)
    return found
