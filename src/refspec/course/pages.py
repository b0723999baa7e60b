"""The site's pages that are made, not written: chapters woven from the code, notebooks executed.

mkdocs.yml names this file as a hook. At each build, `on_files` adds the pages and their files, and puts them where the
navigation says `chapters` and `notebooks`. They are made in a child process, so that a server that runs for hours
weaves from the code as it is then, and kept below .cache/site as long as nothing changes that they are made from.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refspec.chapters import REPOSITORY, SOURCES, CourseError, find_notebooks

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

CHAPTERS = REPOSITORY / "chapters"
NOTEBOOKS = REPOSITORY / "notebooks"
CACHE = REPOSITORY / ".cache" / "site"
MARKER = ".refspec-site"  # stands in every folder that holds a built site
REPLAY = re.compile(r'<div class="refspec-replay".*</div>')
REFUSED = 3  # the child's exit status where a lesson or a notebook is at fault, and one line on stderr says how


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what is made. Raises PluginError, with one line, for a lesson or notebook that cannot be."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    made: dict[str, bytes] = {}
    for unit in units():
        try:
            made |= pages_of(unit)
        except PageError as error:
            raise PluginError(str(error)) from None
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    pages = [path for path in made if path.endswith(".md")]
    config.nav = [_filled(entry, pages) for entry in config.nav or []]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The home page's replay is that of the first chapter. Raises PluginError if that has none."""
    from mkdocs.exceptions import PluginError

    if page.file.src_uri != "index.md":
        return markdown
    lesson = next(file for file in files.documentation_pages() if file.src_uri.startswith(f"{CHAPTERS.name}/"))
    replay = REPLAY.search(lesson.content_string)
    if not replay:
        raise PluginError(f"{lesson.src_uri} has no replay, and the home page shows it")
    return markdown.replace("{{ replay }}", replay[0])


def on_post_build(config: MkDocsConfig) -> None:
    """Leave the marker by which `refspec site build` knows the folder again."""
    (Path(config.site_dir) / MARKER).touch()


def _filled(entry: Any, pages: list[str]) -> Any:
    """A navigation entry; where it names a folder of made pages, with all of these."""
    if isinstance(entry, dict):
        [(title, target)] = entry.items()
        if target in (CHAPTERS.name, NOTEBOOKS.name):
            return {title: [page for page in pages if page.startswith(f"{target}/")]}
    return entry


class PageError(ValueError):
    """A lesson or a notebook that makes no page."""


def units() -> list[str]:
    """What is made separately: all chapters together, since none may leave out a section, and each notebook."""
    return ["chapters", *(f"notebooks/{file.stem}" for file in find_notebooks(NOTEBOOKS))]


def pages_of(unit: str) -> dict[str, bytes]:
    """Contents by path below docs/, from the cache or made now. Raises PageError, with one line."""
    archive = CACHE / f"{unit.replace('/', '-')}.{_fingerprint(unit)}.zip"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        # Bytecode would be written beside the sources, which a server watches.
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "refspec.course.pages", unit, str(archive)]
        child = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if child.returncode == REFUSED:
            raise PageError(child.stderr.strip().splitlines()[-1])
        if child.returncode:
            sys.stderr.write(child.stderr)
            raise PageError(f"making {unit} failed (exit status {child.returncode}): see above")
        for outdated in archive.parent.glob(f"{unit.replace('/', '-')}.*.zip"):
            if outdated != archive:
                outdated.unlink(missing_ok=True)
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name) for name in file.namelist()}


def _fingerprint(unit: str) -> str:
    """Changes with every file that the unit's pages are made from."""
    digest = hashlib.sha256()
    for file in _inputs(unit):
        digest.update(f"{file.relative_to(REPOSITORY)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _inputs(unit: str) -> Iterator[Path]:
    own = CHAPTERS.rglob("*") if unit == "chapters" else [REPOSITORY / f"{unit}.py"]
    for file in sorted([*own, *SOURCES.rglob("*"), REPOSITORY / "requirements.lock"]):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file


def make(unit: str) -> dict[str, bytes]:
    """The unit's pages, made here and now. Raises CourseError where a lesson or a notebook is at fault."""
    if unit == "chapters":
        from refspec.course.weave import weave_course

        return {f"chapters/{name}.md": woven.markdown.encode() for name, woven in weave_course().items()}

    from refspec.course.notebook import render_notebook

    rendered = render_notebook(REPOSITORY / f"{unit}.py")
    return {f"{unit}.md": rendered.markdown.encode()} | {
        f"notebooks/{path}": content for path, content in rendered.files.items()
    }


def main(unit: str, archive: Path) -> int:
    """Make a unit's pages and pack them; the exit status."""
    try:
        made = make(unit)
    except CourseError as error:
        print(error, file=sys.stderr)
        return REFUSED
    unfinished = archive.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in made.items():
            file.writestr(name, content)
    unfinished.replace(archive)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
