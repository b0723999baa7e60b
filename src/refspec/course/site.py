"""The course's site, built into a folder or served while it is being written. mkdocs does the work."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from refspec.chapters import REPOSITORY, find_chapters
from refspec.course.pages import MARKER

CONFIG = REPOSITORY / "mkdocs.yml"
# What the extra `site` of pyproject.toml brings, by the names that are imported.
NEEDED = ("ipykernel", "jupytext", "matplotlib", "mkdocs", "material", "mkdocstrings", "nbclient", "nbconvert")
# What a build reads, and so must not be written into.
READ = ("chapters", "docs", "notebooks", "src")


class SiteError(ValueError):
    """A site that cannot be built, or not there; a port that cannot be had."""


@dataclass(frozen=True)
class BuiltSite:
    """What a build has left behind."""

    out: Path
    pages: int
    seconds: float


def build_site(out: Path | None = None) -> BuiltSite:
    """Build into `out`, by default site/ in the repository. What is there already is replaced at the very end, if it
    is a built site or empty: a build that fails leaves it as it was.

    Raises SiteError, with one line: for anything that mkdocs warns of (links, anchors, pages outside the navigation),
    for a lesson that does not weave, a folder that is something else, or packages that are missing.
    """
    _require_packages()
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort, MkDocsException
    from pymdownx.snippets import SnippetMissingError

    out = (out or REPOSITORY / "site").resolve()
    if any(out.is_relative_to(REPOSITORY / name) for name in READ):
        raise SiteError(f"{out} is where the site is made from: name another folder with --out")
    if out.exists() and not _is_ours(out):
        raise SiteError(f"{out} is not a site that was built here: move it away, or name another folder with --out")
    started = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch,
        collected_complaints() as complaints,
    ):
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        try:
            build(load_config(str(CONFIG), strict=True, site_dir=str(new)))
        except (MkDocsException, SnippetMissingError) as error:
            # An Abort says only that mkdocs gave up; why, it has logged.
            said = complaints if isinstance(error, Abort) and complaints else [*complaints, str(error)]
            what = "; ".join(dict.fromkeys(" ".join(complaint.split()) for complaint in said))
            raise SiteError(f"the site does not build: {what}") from None
        if out.exists():
            out.rename(old)
        new.rename(out)
    pages = [file for file in out.rglob("*.html") if file.name != "404.html"]
    return BuiltSite(out, len(pages), time.perf_counter() - started)


def serve_site(host: str, port: int) -> None:
    """Build, and serve until Ctrl-C; a change in docs/, chapters/, notebooks/ or the sources builds anew.

    Warnings do not stop it: they are logged, as is what it does. Raises SiteError if the site cannot be built at all.
    Whether the port can be had, `require_port` says beforehand.
    """
    _require_packages()
    from mkdocs.commands.serve import serve
    from mkdocs.exceptions import MkDocsException

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("mkdocs")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        serve(str(CONFIG), dev_addr=f"{host}:{port}", site_url=address(host, port), strict=False)
    except MkDocsException as error:
        raise SiteError(f"the site does not build: {error}") from None
    finally:
        log.removeHandler(handler)


def address(host: str, port: int) -> str:
    """Where a site that is served there is found."""
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def require_port(host: str, port: int) -> None:
    """Raises SiteError if nobody can listen there, and says which port is free instead."""
    if not host:
        raise SiteError("--host is empty: name an address of this machine, as in 127.0.0.1")
    problem = _why_not(host, port)
    if problem == errno.EADDRINUSE:
        free = next((p for p in range(port + 1, min(port + 100, 65536)) if _why_not(host, p) is None), None)
        instead = f": refspec site serve --port {free}" if free else ": choose another with --port"
        raise SiteError(f"port {port} of {host} is taken{instead}")
    if problem == errno.EACCES:
        raise SiteError(f"port {port} is for root alone: choose one above 1023 with --port")
    if problem is not None:
        raise SiteError(f"cannot listen on {host}: {os.strerror(problem)}")


def _why_not(host: str, port: int) -> int | None:
    """The errno with which listening there fails."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror as error:
        raise SiteError(f"there is no host {host}: {error.strerror}") from None
    except OSError as error:
        return error.errno
    return None


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MARKER).is_file() or not any(folder.iterdir()))


def _require_packages() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SiteError(f"the site needs {', '.join(missing)}: pip install -e '.[site]'")
    if not CONFIG.is_file():
        raise SiteError(f"there is no {CONFIG}: the site is built from a clone of the repository")
    find_chapters()  # raises CourseError where there are none


@contextlib.contextmanager
def collected_complaints() -> Iterator[list[str]]:
    """The warnings and errors that mkdocs logs meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mkdocs")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
