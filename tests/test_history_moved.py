"""Was it a pure move? Syntax trees compared, on sources made on the spot."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from small_history import FOLDER, Step, clone, counted_git, git, make_history
from typer.testing import CliRunner

from refspec.cli.main import app
from refspec.history import moved as moved_module
from refspec.history.clone import Clone, HistoryError, LacksError
from refspec.history.definitions import units_of
from refspec.history.moved import Refactoring, compare_revisions, compare_sources
from refspec.history.revisions import parent_of

Run = Callable[..., Any]
LONG = """
def walk(tree, limit):
    found = []
    for node in tree:
        if node.depth > limit:
            continue
        found.append(node.name.lower())
    return sorted(found)
"""


def compared(before: dict[str, str], after: dict[str, str]) -> Refactoring:
    return compare_sources(*({path: text.encode() for path, text in side.items()} for side in (before, after)))


def fates(result: Refactoring) -> dict[str, str]:
    """What each definition met with, by its name before, or after if it is new."""
    told = {f"{m.before.path}:{m.before.name}": f"{m.fate} {m.after.path}:{m.after.name}" for m in result.matches}
    told |= {f"{s.definition.path}:{s.definition.name}": "vanished" for s in result.vanished}
    return told | {f"{s.definition.path}:{s.definition.name}": "appeared" for s in result.appeared}


# --- pure moves


def test_to_another_file_another_class_another_line() -> None:
    before = {
        "a.py": f"import os\nX = {{1: 2}}\n{LONG}\nclass A:\n    y = 1\n"
        "    def go(self, a):\n        return a * self.c + 1\n"
    }
    after = {
        "a.py": "class A:\n    y = 1\n",
        "b.py": f"import sys\nclass B:\n    def go(self, a):\n        return a * self.c + 1\n{LONG}\n",
        "c.py": "X = {1: 2}\n",
    }
    result = compared(before, after)
    assert fates(result) == {
        "a.py:X": "moved c.py:X",
        "a.py:walk": "moved b.py:walk",
        "a.py:A": "unchanged a.py:A",
        "a.py:A.go": "moved b.py:B.go",
        "b.py:B": "appeared",
    }
    assert [m.after.lines for m in result.matches if m.before.name == "walk"] == [(6, 12)]


def test_a_whole_class_goes_along() -> None:
    text = "class A(Base):\n    x: int = 1\n    def f(self): return 1\n    class B:\n        def g(self): return 2\n"
    result = compared({"a.py": text}, {"b.py": "\n\n" + text})
    assert result.is_pure_move
    assert {m.fate for m in result.matches} == {"moved"}
    assert [(m.after.name, m.along, m.members) for m in result.matches] == [
        ("A", False, 3),
        ("A.f", True, 0),
        ("A.B", True, 1),
        ("A.B.g", True, 0),
    ]


def test_of_those_in_one_file_only_the_overtaken_have_moved() -> None:
    functions = [LONG.replace("walk", name) for name in "abcd"]
    result = compared({"a.py": "".join(functions)}, {"a.py": "# new\n" + functions[3] + "".join(functions[:3])})
    assert fates(result)["a.py:d"] == "moved a.py:d"
    assert result.counts["unchanged"] == 3
    assert result.is_pure_move


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("def f(a):\n    return a\n", "def f( a ) :\n\n    return (a)\n", ("formatting",)),
        ("def f(a):\n    return 'a'\n", 'def f(a):\n    return "a"\n', ("formatting",)),
        ("def f(a):\n    return a\n", "def f(a):\n    # why\n    return a\n", ("comments",)),
        ('def f(a):\n    """A."""\n    return a\n', 'def f(a):\n    """B."""\n    return a\n', ("docstring",)),
        ("def f(a):\n    return a\n", 'def f(a):\n    """B."""\n    return a  # c\n', ("docstring", "comments")),
        ("def f(a):\n    import x.y as y\n    y(a)\n", "def f(a):\n    import z as y\n    y(a)\n", ("imports",)),
        ("def f(a):\r\n    return a\r\n", "def f(a):\n    return a\n", ()),
    ],
)
def test_what_differs_though_the_trees_are_the_same(old: str, new: str, differs: tuple[str, ...]) -> None:
    for path, fate in (("a.py", "unchanged"), ("b.py", "moved")):
        result = compared({"a.py": old}, {path: new})
        (match,) = result.matches
        assert (match.fate, match.differs, result.is_pure_move) == (fate, differs, True)


def test_a_docstring_indented_more_is_the_same() -> None:
    text = 'def f(a):\n    """One.\n\n    Two.\n    """\n    return a\n'
    inner = "class A:\n    x = 1\n" + "".join("    " + line + "\n" if line else "\n" for line in text.split("\n"))
    (match,) = (m for m in compared({"a.py": text + "\n"}, {"a.py": inner}).matches if m.fate == "moved")
    assert match.differs == ()

    commented = inner.replace("        return a", "        # why\n        return a")
    (match,) = (m for m in compared({"a.py": text + "\n"}, {"a.py": commented}).matches if m.fate == "moved")
    assert match.differs == ("comments",)


# --- what is no pure move


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1", "2"),
        ("1", "1.0"),
        ("1", "True"),
        ("'a'", "b'a'"),
        ("a + b", "b + a"),
        ("a if b else c", "c if b else a"),
        ("f(a)", "await f(a)"),
        ("[a]", "(a,)"),
        ("a.b", "a['b']"),
        ("f'{a}'", "f'{a!r}'"),
        ("lambda x: x", "lambda x=None: x"),
        ("0x" + "f" * 5000, "0x" + "f" * 4999 + "e"),
    ],
)
def test_any_change_of_a_tree_is_found(old: str, new: str) -> None:
    source = "async def f(a, b, c):\n    g()\n    return {}\n"
    result = compared({"a.py": source.format(old)}, {"a.py": source.format(new)})
    assert fates(result) == {"a.py:f": "changed a.py:f"}
    assert result.is_pure_move is False
    assert result.reasons == ["1 changed"]
    assert 0.5 < result.matches[0].similarity < 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def f(): g(1)", "async def f(): g(1)"),
        ("def f(): g(1)", "@d\ndef f(): g(1)"),
        ("def f(): g(1)", "def f(*, a=1): g(1)"),
        ("def f(a): g(1)", "def f(a: int): g(1)"),
        ("class A(B): x = 1", "class A(C): x = 1"),
        ("class A:\n    x: int\n    y: int", "class A:\n    y: int\n    x: int"),
        ("if a:\n    def f(): g(1)", "if b:\n    def f(): g(1)"),
        ("if a:\n    def f(): g(1)", "if a:\n    pass\nelse:\n    def f(): g(1)"),
        ("try:\n    X = 1\nexcept E:\n    pass", "try:\n    pass\nexcept E:\n    X = 1"),
        ("X = 1", "X = 2"),
        ("X: int = 1", "X: str = 1"),
    ],
)
def test_a_change_around_the_body_is_found(old: str, new: str) -> None:
    result = compared({"a.py": old + "\n"}, {"a.py": new + "\n"})
    assert [m.fate for m in result.matches] == ["changed"]
    assert (result.vanished, result.appeared) == ((), ())


def test_moved_and_changed_is_found_by_name_or_by_likeness() -> None:
    changed = LONG.replace("node.depth > limit", "node.depth >= limit")
    renamed = changed.replace("walk", "names_up_to")
    for text, name in ((changed, "walk"), (renamed, "names_up_to")):
        result = compared({"a.py": LONG + "X = 1\n"}, {"a.py": "X = 1\n", "b.py": "Y = 2\n" + text})
        assert fates(result)["a.py:walk"] == f"moved and changed b.py:{name}"
        (match,) = result.of("moved and changed")
        assert 0.9 < match.similarity < 1
        assert "-        if node.depth > limit:" in match.diff()
        assert "+        if node.depth >= limit:" in match.diff()


def test_a_new_one_in_the_old_ones_place_is_not_taken_for_it() -> None:
    """The body went elsewhere, with a change; what bears its name now merely calls it."""
    stub = "def walk(tree, limit):\n    return b.walk(tree, limit)\n"
    result = compared({"a.py": LONG}, {"a.py": stub, "b.py": LONG.replace("sorted(found)", "found")})
    assert [str(m.after) for m in result.of("moved and changed")] == ["b.py:2 walk"]
    assert [str(s.definition) for s in result.appeared] == ["a.py:1 walk"]


def test_strangers_of_one_name_are_no_kin() -> None:
    result = compared({"a.py": LONG}, {"b.py": "def walk():\n    print('hello')\n"})
    assert fates(result) == {"a.py:walk": "vanished", "b.py:walk": "appeared"}


def test_renamed_and_calls_to_itself_with_it() -> None:
    text = "def f(n, acc):\n    if n == 0:\n        return acc\n    return f(n - 1, acc * n)\n"
    result = compared({"a.py": text}, {"b.py": text.replace("f(", "fold(")})
    assert fates(result) == {"a.py:f": "renamed b.py:fold"}
    assert result.reasons == ["1 renamed"]


def test_what_is_too_small_is_not_called_renamed() -> None:
    result = compared({"a.py": "def f(self): return 1\nX = 0\n"}, {"b.py": "def g(self): return 1\nY = 0\n"})
    assert (len(result.vanished), len(result.appeared)) == (2, 2)


def test_a_class_renamed_while_a_method_changed() -> None:
    methods = [f"    def {name}(self, a): return self.{name}s[a] + {{}}\n" for name in "fgh"]
    text = "class Old(Base):\n    def s(self): return 0\n" + methods[0].format(1) + methods[1].format(2) + methods[2]
    result = compared({"a.py": text.format(3)}, {"b.py": text.format(4).replace("Old", "New")})
    assert fates(result) == {
        "a.py:Old": "renamed b.py:New",
        "a.py:Old.s": "moved b.py:New.s",
        "a.py:Old.f": "moved b.py:New.f",
        "a.py:Old.g": "moved b.py:New.g",
        "a.py:Old.h": "moved and changed b.py:New.h",
    }


# --- twins


def test_the_same_body_several_times() -> None:
    classes = "".join(
        f"class {name}:\n    x = '{name}'\n    def get(self, a): return self.x[a] + 1\n" for name in "ABC"
    )
    result = compared({"a.py": classes}, {"b.py": "\n" + classes})
    assert result.is_pure_move
    assert all(m.before.name == m.after.name for m in result.matches)
    fewer = compared({"a.py": classes}, {"a.py": classes.partition("class C")[0]})
    assert fates(fewer)["a.py:C.get"] == fates(fewer)["a.py:C"] == "vanished"
    assert fewer.counts["unchanged"] == 4


def test_overloads_and_property_pairs() -> None:
    text = """
class A:
    @overload
    def f(self, a: int) -> int: ...
    @overload
    def f(self, a: str) -> str: ...
    def f(self, a): return a
    @property
    def x(self): return self._x
    @x.setter
    def x(self, value): self._x = value
"""
    assert compared({"a.py": text}, {"b.py": text}).is_pure_move
    changed = compared({"a.py": text}, {"a.py": text.replace("self._x = value", "self._x = value + 1")})
    (match,) = changed.of("changed")
    assert match.before.source.startswith("    @x.setter")
    assert changed.counts["unchanged"] == 5
    without_getter = text.replace("    @property\n    def x(self): return self._x\n", "")
    (gone,) = compared({"a.py": text}, {"a.py": without_getter}).vanished
    assert gone.definition.source.startswith("    @property")


def test_nested_functions() -> None:
    text = "def outer(a):\n    def inner(b):\n        return {} + b\n    return map(inner, {})\n"
    inside = compared({"a.py": text.format(1, "a")}, {"a.py": text.format(2, "a")})
    assert fates(inside) == {"a.py:outer": "unchanged a.py:outer", "a.py:outer.inner": "changed a.py:outer.inner"}
    around = compared({"a.py": text.format(1, "a")}, {"a.py": text.format(1, "a[1:]")})
    assert fates(around) == {"a.py:outer": "changed a.py:outer", "a.py:outer.inner": "unchanged a.py:outer.inner"}
    taken_out = compared(
        {"a.py": text.format(1, "a")},
        {"a.py": "def inner(b):\n    return 1 + b\ndef outer(a):\n    return map(inner, a)\n"},
    )
    assert fates(taken_out) == {"a.py:outer": "changed a.py:outer", "a.py:outer.inner": "moved a.py:inner"}


def test_conditional_definitions_keep_to_their_branch() -> None:
    text = "if cuda:\n    def f(a): return a.x(1)\nelse:\n    def f(a): return a.x(2)\n"
    assert compared({"a.py": text}, {"b.py": text}).is_pure_move
    swapped = compared({"a.py": text}, {"a.py": text.replace("x(1)", "x(3)").replace("x(2)", "x(1)")})
    assert swapped.is_pure_move is False


def test_each_files_own_logger_is_no_hindrance() -> None:
    own = "import logging\nlogger = logging.getLogger(__name__)\n"
    split = compared({"a.py": own + LONG + "class A: x = 1\n"}, {"a.py": own + LONG, "b.py": own + "class A: x = 1\n"})
    assert split.is_pure_move
    assert [str(s.copy_of) for s in split.appeared] == ["a.py:2 logger"]
    merged = compared({"a.py": own + LONG, "b.py": own + "class A: x = 1\n"}, {"a.py": own + LONG + "class A: x = 1\n"})
    assert merged.is_pure_move
    assert (split.forgiven, merged.forgiven) == ({"vanished": 0, "appeared": 1}, {"vanished": 1, "appeared": 0})
    copied = compared({"a.py": LONG, "b.py": ""}, {"a.py": LONG, "b.py": LONG})
    assert copied.forgiven == {"vanished": 0, "appeared": 0}
    assert copied.reasons == ["1 appeared"]
    assert [str(s.copy_of) for s in copied.appeared] == ["a.py:2 walk"]


def test_a_class_with_other_bases_is_told_with_both() -> None:
    stub = 'class Worker(Old, metaclass=M):\n    """A worker."""\n    x = 1\n    y = 2\n'
    grown = stub.replace("Old, metaclass=M", "New") + "\n" + textwrap.indent(LONG, "    ")
    (match,) = compared({"a.py": stub}, {"a.py": grown}).matches
    assert (match.fate, match.bases) == ("changed", ("Old, metaclass=M", "New"))
    assert match.similarity > 0.5, "its own statements are nearly the same, whatever is defined in it now"
    (match,) = compared({"a.py": stub}, {"a.py": stub.replace("y = 2", "y = 3")}).matches
    assert match.bases is None
    (match,) = compared({"a.py": LONG}, {"a.py": LONG.replace("sorted(found)", "found")}).matches
    assert match.bases is None


def test_the_two_closing_lines_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "import logging\nlogger = logging.getLogger(__name__)\n"
    base = "class A(B):\n    x = 1\n    y = 2\n    z = 3\n"
    steps = [
        Step("one", {f"{FOLDER}/a.py": own + LONG + base}),
        Step("two", {f"{FOLDER}/a.py": own + LONG + base.replace("(B)", ""), f"{FOLDER}/b.py": own + LONG}),
    ]
    make_history(tmp_path / "repo", steps)
    monkeypatch.setenv("REFSPEC_SGLANG", str(tmp_path / "repo"))
    told = CliRunner().invoke(app, ["history", "moved", "main"]).stdout
    assert "    logger =  line 2, a copy of a.py:2 logger, left out of the verdict\n" in told
    assert re.search(r"class A  line \d+, \d\d% alike without what is defined in it, bases B -> none\n", told)
    assert ", 2 appeared\nNot a pure move: 1 changed, 1 appeared.\nLeft out there: 1 appeared, " in told
    document = json.loads(CliRunner().invoke(app, ["history", "moved", "main", "--json"]).stdout)
    assert [single["forgiven"] for single in document["appeared"]] == [True, False]
    assert [match["bases"] for match in document["matches"]] == [["B", ""]]


def test_nothing_at_all() -> None:
    result = compared({"a.py": "", "b.py": '"""Only words."""\n'}, {"c.py": "import os\n"})
    assert result.is_pure_move
    assert not result.matches


def test_small_twins_go_where_their_file_went() -> None:
    files = {f"{name}.py": f"_is_x = f()\n{LONG.replace('walk', name)}" for name in "ab"}
    result = compared(files, {"y.py": files["a.py"], "x.py": files["b.py"]})
    assert fates(result)["a.py:_is_x"] == "moved y.py:_is_x"
    assert fates(result)["b.py:_is_x"] == "moved x.py:_is_x"


def test_a_class_that_grew_is_not_taken_for_its_copy() -> None:
    text = "class P(Base):\n    x = 1\n    def m(self, a): return self.x[a] + 1\n"
    grown = text + "    def n(self, a): return self.x[a] + 2\n"
    result = compared({"a.py": text}, {"a.py": grown, "b.py": text.replace("    x", "    # c\n    x")})
    assert fates(result) == {
        "a.py:P": "unchanged a.py:P",
        "a.py:P.m": "unchanged a.py:P.m",
        "a.py:P.n": "appeared",
        "b.py:P": "appeared",
        "b.py:P.m": "appeared",
    }


# --- files of all kinds


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"def f(:\n", "line 1: "),
        (b"'\xe9'\n", "invalid or missing encoding declaration"),
        (b"X = 1\n\ndef f(): return '\xe9'\n", "byte 24 is no utf-8"),
        (b"# coding: klingon\n", "klingon"),
        (b"x = '\0'\n", "null byte"),
        (None, "this clone lacks it"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_and_the_rest_goes_on(content: bytes | None, why: str) -> None:
    result = compare_sources(
        {"a.py": content, "b.py": LONG.encode()}, {"a.py": b"A = 1\nB = 2\n", "c.py": LONG.encode()}
    )
    ((revision, path, said, unknown),) = [tuple(vars(file).values()) for file in result.unread]
    assert (revision, path, unknown) == ("before", "a.py", 2)
    assert why in said
    assert fates(result) == {"b.py:walk": "moved c.py:walk"}
    assert result.is_pure_move is None


def test_what_changed_for_sure_is_no_pure_move_whatever_could_not_be_read() -> None:
    assert compare_sources({"a.py": b"(", "b.py": b"X = 1"}, {"b.py": b"X = 2"}).is_pure_move is False


@pytest.mark.parametrize(
    "disguise",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: text.replace("\n\n", "\n\x0c\n").encode(),
        lambda text: b"# coding: latin-1\n" + text.encode("latin-1"),
        lambda text: text.encode() + b"   # \xe2\x80\xa8 a separator that ends no line",
    ],
    ids=["BOM", "CRLF", "CR", "form feed", "latin-1", "U+2028"],
)
def test_bytes_of_all_kinds(disguise: Callable[[str], bytes]) -> None:
    text = f"A = 'caf\xe9'\n\n{LONG}\n\nclass B:\n    def f(self): return 1\n"
    result = compare_sources({"a.py": disguise(text)}, {"b.py": text.encode()})
    assert result.is_pure_move
    assert result.unread == ()
    assert all(not m.differs for m in result.matches)


def test_deep_and_long_trees() -> None:
    deep = "X = " + " + ".join("a" * 900)
    assert compared({"a.py": deep}, {"b.py": deep}).is_pure_move
    chain = "if a == 0: b()\n" + "".join(f"elif a == {n}: b({n})\n" for n in range(1, 400))
    body = "def f(a):\n" + "".join(f"    {line}\n" for line in chain.splitlines())
    assert compared({"a.py": body}, {"b.py": body}).is_pure_move
    too_deep = compared({"a.py": "X = " + "-" * 100_000 + "1"}, {"a.py": "X = 1"})
    assert [file.path for file in too_deep.unread] == ["a.py"]


def test_nothing_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = f"open({str(trap)!r}, 'w')\n@print\ndef f(a=open({str(trap)!r}, 'w')): pass\n"
    compared({"a.py": text}, {"b.py": text})
    assert not trap.exists()


def test_the_work_does_not_grow_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of namesakes, all of them changed, and as many that are like all others."""
    called = []
    real = moved_module._similarity
    monkeypatch.setattr(moved_module, "_similarity", lambda *a: called.append(1) or real(*a))
    n = 300
    classes = [f"class A{i}:\n    def forward(self, x): return self.layer{i}(x) + {{}}\n" for i in range(n)]
    before = {f"{i}.py": text.format(1) for i, text in enumerate(classes)}
    after = {f"new/{i}.py": text.format(2) for i, text in enumerate(classes)}
    result = compared(before, after)
    assert result.counts["moved and changed"] == n
    assert all(m.before.name == m.after.name for m in result.matches)
    assert len(called) <= 8 * n


# --- properties

expressions = st.recursive(
    st.sampled_from(["a", "b", "self", "None"]) | st.integers(0, 99).map(str) | st.sampled_from(["'x'", "2.5", "b'y'"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.lists(inner, max_size=3).map(lambda items: f"f({', '.join(items)})"),
        inner.map(lambda text: f"a.b[{text}]"),
    ),
    max_leaves=6,
)
bodies = st.lists(expressions, min_size=1, max_size=4)


@st.composite
def definitions(draw: st.DrawFn) -> list[str]:
    """Sources of definitions whose names are unique; a mark stands in one of them for the constant that is changed."""
    made = []
    for number in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["def", "async def", "class", "constant"]))
        made.append(_definition(kind, f"n{number}", draw))
    return made


def _definition(kind: str, name: str, draw: st.DrawFn) -> str:
    if kind == "constant":
        return f"{name} = {draw(expressions)}\n"
    if kind == "class":
        methods = ""
        for method in ("get", "put"):
            methods += f"    def {method}(self, a):\n" + "".join(f"        v = {line}\n" for line in draw(bodies))
        return f"class {name}(Base):\n{methods}"
    nested = f"    def inner(a):\n        return {draw(expressions)}\n" if draw(st.booleans()) else ""
    return f"{kind} {name}(a, b=1):\n{nested}" + "".join(f"    v = {line}\n" for line in draw(bodies))


def spread(parts: list[str], places: list[int]) -> dict[str, str]:
    files: dict[str, str] = {f"{n}.py": "import os\n" for n in range(3)}
    for part, place in zip(parts, places, strict=True):
        files[f"{place}.py"] += part
    return files


@given(definitions(), st.data())
@settings(max_examples=60, deadline=None)
def test_shuffling_between_files_is_a_pure_move(parts: list[str], data: st.DataObject) -> None:
    places = st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts))
    shuffled = data.draw(st.permutations(parts))
    result = compared(spread(parts, data.draw(places)), spread(shuffled, data.draw(places)))
    assert result.is_pure_move
    assert not result.vanished
    assert not result.appeared
    assert all(m.before.name == m.after.name for m in result.matches)


@given(definitions(), definitions(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_definition_is_told_once(old: list[str], new: list[str], data: st.DataObject) -> None:
    """Whatever happened: names, bodies and whole definitions that come again, and again."""
    old = old + data.draw(st.lists(st.sampled_from(old), max_size=3))
    new = data.draw(st.lists(st.sampled_from(old + new), max_size=12))
    new = [part.replace("n0", "n1") if data.draw(st.booleans()) else part for part in new]
    places = st.integers(0, 2)
    sides = [spread(parts, [data.draw(places) for _ in parts]) for parts in (old, new)]
    result = compared(*sides)
    for side, singles, files in zip(("before", "after"), (result.vanished, result.appeared), sides, strict=True):
        told = [getattr(match, side) for match in result.matches] + [single.definition for single in singles]
        there = [
            unit.definition for path in files for top in units_of(path, files[path].encode()) for unit in top.walk()
        ]
        assert Counter(map(str, told)) == Counter(map(str, there))
    assert [
        match for match in result.matches if match.fate == "unchanged" and match.before.name != match.after.name
    ] == []


@given(definitions(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_constant_is_found_where_it_is(parts: list[str], data: st.DataObject) -> None:
    places = st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts))
    marked = data.draw(st.integers(0, len(parts) - 1))
    constant = "    def put(self, a):\n" if parts[marked].startswith("class") else ""
    changed = [*parts]
    if constant:
        parts[marked] = parts[marked].replace(constant, constant + "        w = 1000\n")
        name = f"n{marked}.put"
    elif parts[marked].startswith(("def", "async")):
        parts[marked] += "    return 1000\n"
        name = f"n{marked}"
    else:
        parts[marked] = parts[marked].rstrip() + " == 1000\n"
        name = f"n{marked}"
    changed = [part.replace("1000", "1001") for part in parts]
    result = compared(spread(parts, data.draw(places)), spread(data.draw(st.permutations(changed)), data.draw(places)))
    assert result.is_pure_move is False
    assert [(m.before.name, m.after.name) for m in result.matches if m.similarity < 1] == [(name, name)]
    assert not result.vanished
    assert not result.appeared


# --- on a repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A release; a move across the folder's border; a move with a change; a broken file."""
    folder = tmp_path_factory.mktemp("moved") / "repo"
    after = {f"{FOLDER}/f.py": None, f"{FOLDER}/d x/g.py": LONG, "python/sglang/other.py": "class A:\n    x = 1\n"}
    steps = [
        Step("Start (#1)", {f"{FOLDER}/f.py": LONG + "class A:\n    x = 1\n", "notes.md": "a"}, tags=("v0.0.1",)),
        Step("Move (#2)", {**after, f"{FOLDER}/data.bin": b"\0\1"}, tags=("v0.0.2",)),
        Step("Move more (#3)", {f"{FOLDER}/d x/g.py": None, f"{FOLDER}/h.py": LONG.replace("sorted(found)", "found")}),
        Step("Break \x1b[31mit (#4)", {f"{FOLDER}/bro\x1b[31mken.py": "def (:\n", f"{FOLDER}/h.py": "X = 1\n"}),
    ]
    return folder, make_history(folder, steps)


@pytest.fixture
def run(repository: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("REFSPEC_SGLANG", str(repository[0]))
    return lambda *arguments: CliRunner().invoke(app, ["history", "moved", *arguments])


def test_GIT_06_a_moved_file_with_a_space_in_its_path(run: Run) -> None:
    told = run("#2", "--path", "python/sglang")
    assert told.exit_code == 0, told.output
    assert "srt/speculative/f.py -> srt/speculative/d x/g.py\n    def walk  line 2" in told.stdout
    assert "srt/speculative/f.py -> other.py\n    class A  line 9 -> 1\n" in told.stdout
    assert "A pure move.\n" in told.stdout
    alone = run("#2")
    assert "Vanished (1)\n  f.py\n    class A  line 9\n" in alone.stdout
    assert "Not a pure move: 1 vanished." in alone.stdout


def test_two_revisions_of_all_kinds_mean_the_same(run: Run, repository: tuple[Path, list[str]]) -> None:
    commits = repository[1]
    answers = {
        run(*names, "--json").stdout
        for names in (["#2"], ["#1", "#2"], ["0.0.1", "0.0.2"], ["v0.0.1", "main~2"], [commits[0][:9], commits[1]])
    }
    assert len(answers) == 1
    document = json.loads(answers.pop())
    assert (document["before"], document["after"]) == tuple(commits[:2])
    assert document["other_files"] == 1
    assert document["counts"]["moved"] == 1


def test_the_first_commit_is_compared_with_nothing(run: Run) -> None:
    told = run("#1")
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("the empty tree\n")
    assert "Appeared (2)" in told.stdout


def test_a_difference_is_shown_when_asked_for(run: Run) -> None:
    told = run("#3", "--diff")
    assert "      -    return sorted(found)\n      +    return found\n" in told.stdout
    assert "% alike" in told.stdout
    (match,) = json.loads(run("#3", "--diff", "--json").stdout)["matches"]
    assert "-    return sorted(found)" in match["diff"]


def test_a_broken_file_is_told_and_ends_in_1(run: Run) -> None:
    told = run("#4")
    assert told.exit_code == 1
    assert "after: python/sglang/srt/speculative/bro\\x1b[31mken.py: line 1: " in told.stderr
    assert "\x1b" not in told.output
    assert "Vanished (1)" in told.stdout
    assert "A pure move? Not known" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-x"], "No such option"),
        (["--", "-x"], "a revision cannot begin with '-': -x"),
        (["nowhere"], "this clone lacks the revision nowhere"),
        (["#77"], "no commit of PR #77 on main of this clone"),
        (["0.9.9"], "this clone lacks the tag v0.9.9"),
        (["#2", "--path", "src"], "neither revision has the path src"),
        (["#2", "--path", "../up"], "--path: not a path in SGLang's repository"),
        (["#2", "--path", "/python"], "--path: not a path in SGLang's repository"),
        (["#2", "--path", ":(glob)**"], "neither revision has the path :(glob)**"),
        (["#2", "--path", "a\nb"], "--path: not a path in SGLang's repository"),
        (["#2", "--path", ""], "--path: not a path in SGLang's repository"),
    ],
)
def test_what_cannot_be_asked(run: Run, arguments: list[str], complaint: str) -> None:
    told = run(*arguments)
    assert told.exit_code != 0
    assert complaint in told.stderr
    assert len(told.stderr.splitlines()) == 1


def test_all_of_the_repository(run: Run) -> None:
    for path in (".", "./"):
        assert "in the whole repository" in run("#2", "--path", path).stdout
    assert run("#2", "--path", "./python//").stdout == run("#2", "--path", "python").stdout


def test_without_a_clone_one_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["history", "moved", "27607"])
    assert told.exit_code == 1
    assert told.stderr.startswith("refspec: moved needs a clone of SGLang")


def test_40_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    told = run("#2", "--path", "python/sglang")
    assert max(map(len, told.stdout.splitlines())) <= 40


def test_clones_that_lack_something(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, commits = repository
    shallow = Clone(clone(folder, tmp_path / "shallow", "--depth", "1"))
    with pytest.raises(LacksError, match=r"lacks the parent of .*git fetch --unshallow"):
        parent_of(shallow, commits[3])
    blobless = Clone(clone(folder, tmp_path / "blobless", "--filter=blob:none", "--no-checkout"))
    with pytest.raises(LacksError, match="lacks the contents of all files that differ"):
        compare_revisions(blobless, commits[0], commits[1])
    assert parent_of(blobless, commits[1]) == commits[0]


def test_contents_that_a_clone_lacks_are_told_once(tmp_path: Path) -> None:
    """A work tree brings those of its commit, so that those of the one before are missing."""
    files = [f"{FOLDER}/{n}.py" for n in range(5)]
    make_history(
        tmp_path / "r",
        [
            Step("a (#1)", dict.fromkeys(files, LONG)),
            Step("b (#2)", dict.fromkeys(files, f"{LONG}X = 1\n")),
        ],
    )
    blobless = clone(tmp_path / "r", tmp_path / "blobless", "--filter=blob:none")
    told = CliRunner().invoke(app, ["history", "moved", "#2", "--clone", str(blobless)])
    assert told.exit_code == 1
    assert told.stderr.startswith("refspec: this clone lacks contents of 5 Python files of 5, so ")
    assert told.stderr.count("\n") == 1


def test_git_is_started_as_often_for_many_files_as_for_few(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    many = tmp_path / "many"
    make_history(
        many,
        [
            Step("a (#1)", {f"{FOLDER}/{n}.py": LONG for n in range(60)}),
            Step("b (#2)", {f"{FOLDER}/{n}.py": f"{LONG}X = {n}" for n in range(60)}),
        ],
    )
    numbers = []
    for folder in (repository[0], many):
        (tmp_path / folder.name).mkdir(exist_ok=True)
        with counted_git(tmp_path / folder.name) as calls:
            told = CliRunner().invoke(app, ["history", "moved", "#2", "--clone", str(folder)])
        assert told.exit_code == 0
        numbers.append(len(calls))
    assert numbers[0] == numbers[1] <= 12


def test_links_and_submodules_are_no_sources(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    make_history(folder, [Step("a", {f"{FOLDER}/a.py": "X = 1\n"})])
    (folder / FOLDER / "link.py").symlink_to("a.py")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "b")
    made = Clone(folder)
    result = compare_revisions(made, made.commit("main~1"), made.commit("main"))
    assert (result.files, result.other_files) == ((), 0)


def test_history_error_is_one(repository: tuple[Path, list[str]]) -> None:
    with pytest.raises(HistoryError):
        compare_revisions(Clone(repository[0]), *repository[1][:2], path="none")
