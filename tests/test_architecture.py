"""The building as the design draws it: floors, no stairs upward, rooms with a name and a sign at the door."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted((SOURCE / "refspec").rglob("*.py"))

# From the ground up. A module imports what lies on a lower floor, or on its own. "" is the package itself, which hands
# out the engine's names.
FLOORS = [
    "printable",
    "cache",
    "config",
    "contracts",
    "trace",
    "kernels",
    "memory",
    "models",
    "runtime",
    "requests",
    "spec",
    "workers",
    "engine",
    "",
    "oracle",
    "bench",
    "doctor",
    "chapters",
    "history",
    "grader",
    "course",
    "cli",
    "__main__",
]


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def floor_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Our own modules that this one imports, wherever in it; what is there for the type checker alone is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imports_of(other)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "refspec")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports here name the whole path"
            assert node.module is not None
            if node.module.split(".")[0] == "refspec":
                for name in node.names:
                    inner = f"{node.module}.{name.name}"
                    yield inner if inner in MODULES else node.module
        else:
            yield from imports_of(node)


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


@functools.cache
def imports() -> dict[str, list[str]]:
    """By module. Not done at import: every process that runs tests collects this file, and one runs it."""
    return {module: sorted(set(imports_of(parsed(file)))) for module, file in MODULES.items()}


def test_every_module_has_its_floor() -> None:
    assert {floor_of(module) for module in MODULES} <= set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_lead_downward(module: str) -> None:
    floor = FLOORS.index(floor_of(module))
    # The package hands out the engine's names on demand; the floor below it does not count as below.
    upward = [other for other in imports()[module] if FLOORS.index(floor_of(other)) > floor]
    assert upward == []


def test_nothing_imports_itself_by_a_detour() -> None:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in imports().get(module, []):
                visit(other, [*path, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])


def test_imports_name_modules_that_exist() -> None:
    """What the two tests above walk along is complete."""
    for module, others in imports().items():
        assert set(others) <= set(MODULES), module
    assert "refspec.spec.draft" in imports()["refspec.workers.eagle_v1"]


def test_config_contracts_and_trace_stand_on_the_ground() -> None:
    for module in ("refspec.config", "refspec.contracts", "refspec.trace"):
        assert imports()[module] == []


def test_the_parser_sees_imports_inside_functions_and_not_those_for_types() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from refspec.cli import main
def late():
    from refspec.kernels import build_tree
    import refspec.trace
"""
    assert list(imports_of(ast.parse(source))) == ["refspec.kernels.build_tree", "refspec.trace"]


def test_no_drawer_for_odds_and_ends() -> None:
    names = {part for module in MODULES for part in module.split(".")}
    assert not names & {"util", "utils", "helper", "helpers", "common", "misc", "tools"}


def test_the_round_can_be_read_in_one_sitting() -> None:
    """workers/eagle_v1.py and what it imports from spec/, further imports among them included; but for what chains have
    of their own, which comes later in the course.
    """
    later = {"refspec.spec.chain", "refspec.spec.adaptive_steps"}
    todo, files = ["refspec.workers.eagle_v1"], set()
    while todo:
        module = todo.pop()
        files.add(module)
        todo += [m for m in imports()[module] if m.startswith("refspec.spec.") and m not in files | later]
    assert {"refspec.spec.draft", "refspec.spec.tree", "refspec.spec.verify", "refspec.spec.commit"} < files
    lines = sum(len(MODULES[module].read_text(encoding="utf-8").splitlines()) for module in files)
    assert lines <= 830


def undocumented(file: Path) -> Iterator[str]:
    """Public classes and functions of the module without a docstring; a file with code has one too."""
    tree = parsed(file)
    if tree.body and ast.get_docstring(tree) is None:
        yield "the module"
    for node in tree.body:
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and not node.name.startswith("_") and ast.get_docstring(node) is None:
            yield node.name


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_and_class_says_what_it_is(module: str) -> None:
    assert list(undocumented(MODULES[module])) == []
