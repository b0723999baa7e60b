"""The built site: every link leads somewhere, nothing comes from elsewhere, and a fault fails the build."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import griffe
import pytest
from built_site import COMMAND, REPO, build, built_site, quiet

from refspec.chapters import CourseError, find_chapters
from refspec.course import pages, site
from refspec.course.docstrings import Layout, list_fields
from refspec.course.site import SiteError, build_site

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

SITE_URL = "http://127.0.0.1:8000/"  # as in mkdocs.yml
ASSETS = {("script", "src"), ("link", "href"), ("img", "src"), ("source", "src"), ("iframe", "src"), ("video", "src")}


@dataclass(frozen=True)
class Link:
    """An address in a page, and where it stands."""

    page: Path
    tag: str
    attribute: str
    address: str
    is_download: bool
    relation: str | None

    def __str__(self) -> str:
        return f"{self.page}: {self.address}"


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.links, self.anchors = file, list[Link](), {""}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        for attribute in ("href", "src"):
            if (address := given.get(attribute)) is not None:
                self.links.append(Link(self.file, tag, attribute, address, "download" in given, given.get("rel")))


@pytest.fixture(scope="module")
def all_pages() -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(built_site().rglob("*.html"))}


def target_of(link: Link) -> tuple[Path, str] | None:
    """The file and the anchor that a link leads to; None if that is on another host."""
    address = link.address
    if link.page.name == "404.html" and address.startswith("/"):  # it is shown at any depth, so it says the whole path
        address = address.removeprefix(urlsplit(SITE_URL).path).lstrip("/")
    address = address.removeprefix(SITE_URL)
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    file = link.page if not parts.path else (link.page.parent / unquote(parts.path)).resolve()
    if address != link.address:
        file = (built_site() / unquote(parts.path)).resolve()
    return (file / "index.html" if file.is_dir() else file), unquote(parts.fragment)


def broken(all_pages: dict[Path, Page]) -> Iterator[str]:
    for page in all_pages.values():
        for link in page.links:
            target = target_of(link)
            if target is None:
                continue
            file, anchor = target
            if not file.is_file():
                yield f"{link}: no such file"
            elif anchor and anchor not in (all_pages[file].anchors if file in all_pages else ()):
                yield f"{link}: no such anchor"
            if file.suffix in (".md", ".ipynb") and not link.is_download:
                yield f"{link}: a source, and not marked as a download"


def test_SITE_01_every_link_of_the_built_site_leads_somewhere(all_pages: dict[Path, Page]) -> None:
    assert len(all_pages) > 10
    assert sum(len(page.links) for page in all_pages.values()) > 1000
    assert list(broken(all_pages)) == []


def test_SITE_01_the_crawler_sees_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "built_site", lambda: tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text("<p id=there>")
    (tmp_path / "raw.ipynb").touch()
    (tmp_path / "a.html").write_text(
        '<a href="b/#there">fine</a><a href="https://example.org/">elsewhere</a><a href="raw.ipynb" download>fine</a>'
        f'<a href="{SITE_URL}b/">fine</a><a href="b/#gone">1</a><a href="gone/">2</a><a href="raw.ipynb">3</a>'
        f'<img src="gone.png"><a href="#gone">5</a><a href="{SITE_URL}gone/">6</a>'
    )
    found = {file: Page(file) for file in tmp_path.rglob("*.html")}
    assert [line.split(": ", 1)[1] for line in broken(found)] == [
        "b/#gone: no such anchor",
        "gone/: no such file",
        "raw.ipynb: a source, and not marked as a download",
        "gone.png: no such file",
        "#gone: no such anchor",
        f"{SITE_URL}gone/: no such file",
    ]


def test_nothing_is_loaded_from_another_host(all_pages: dict[Path, Page]) -> None:
    foreign = [
        str(link)
        for page in all_pages.values()
        for link in page.links
        if (link.tag, link.attribute) in ASSETS and target_of(link) is None and link.relation != "canonical"
    ]
    assert foreign == []
    for sheet in built_site().rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        loaded = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)
        assert [a or b for a, b in loaded if urlsplit(a or b).netloc] == [], sheet
    own = (built_site() / "assets" / "replay.js").read_text(encoding="utf-8")
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|insertAdjacentHTML|\beval\b", own) == []


def test_pages_are_those_of_the_course(all_pages: dict[Path, Page]) -> None:
    for chapter in find_chapters():
        assert (built_site() / "chapters" / chapter.name / "index.html") in all_pages
        home = all_pages[built_site() / "index.html"]
        assert f"chapters/{chapter.name}/" in {link.address for link in home.links}, "the home page lists it"
    for notebook in pages.NOTEBOOKS.glob("*.py"):
        assert (built_site() / "notebooks" / notebook.stem / "index.html") in all_pages
    assert build()["pages"] == len(all_pages) - 1  # 404.html is none that one goes to
    assert not list(built_site().rglob("training"))


def test_every_term_of_the_glossary_has_an_anchor() -> None:
    text = (REPO / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^### .*$", text, flags=re.MULTILINE)
    assert len(terms) > 30
    assert [term for term in terms if not re.search(r"\{ #[\w-]+ \}$", term)] == []


# --- the reference


def public_modules() -> list[str]:
    """All that say anything, but for the commands, which have --help."""
    source = REPO / "src"
    names = []
    for file in sorted((source / "refspec").rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        is_public = not any(part.startswith("_") for part in name.split("."))
        if is_public and not name.startswith("refspec.cli") and file.read_text(encoding="utf-8").strip():
            names.append(name)
    return names


def test_every_public_module_is_on_one_page_of_the_reference() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (REPO / "docs" / "reference").glob("*.md"))
    listed = Counter(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))
    assert listed == Counter(public_modules())


def test_reference_shows_signatures_and_sources_and_nothing_private(all_pages: dict[Path, Page]) -> None:
    page = built_site() / "reference" / "spec" / "index.html"
    anchors = all_pages[page].anchors
    assert {"refspec.spec.draft", "refspec.spec.draft.select_top_k_tokens"} <= anchors
    assert [a for file in all_pages.values() for a in file.anchors if re.match(r"refspec\..*\._(?!_)", a)] == []
    text = page.read_text(encoding="utf-8")
    assert "Source code in" in text
    assert "RunningBatch" in text


def test_the_page_on_algorithms_holds_the_example(all_pages: dict[Path, Page]) -> None:
    """A formatter that takes an include for code, and spaces it out, leaves the build content and the page empty."""
    text = (built_site() / "algorithms" / "index.html").read_text(encoding="utf-8")
    assert "RepeatLast" in text
    assert "repeat_last:ALGORITHM" in text
    for page in all_pages:
        assert not re.search(r"8 ?&lt; ?--", page.read_text(encoding="utf-8")), page


def test_fields_in_a_docstring_become_a_list() -> None:
    assert list_fields("Words: and more\nwords.\n\na, b: one\n    goes on\ntopk (k): two\n\nlast") == (
        "Words: and more\nwords.\n\n- `a, b`: one\n    goes on\n- `topk (k)`: two\n\nlast"
    )
    for prose in (
        "word: only one",
        "word: two\nlines that go on",
        "Raises A: this\nand: that",
        "    code: a\n    b: c",
    ):
        assert list_fields(prose) == prose


def test_commented_fields_of_a_class_become_a_table(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        'class A:\n    """Of fields."""\n\n    x: int  # (b*N) of [a][b]\n    # above,\n    # in two lines\n'
        "    y: int | None = None\n    bare: int\n    _z: int  # private\n\n"
        "    @property\n    def p(self): ...  # no field\n"
        'class B:\n    """No comments."""\n\n    x: int\n'
    )
    extensions = griffe.load_extensions(Layout())
    module = griffe.load("module", search_paths=[tmp_path], extensions=extensions, allow_inspection=False)
    assert module["A"].docstring.value == (
        "Of fields.\n\n| field | type | what it holds |\n|---|---|---|\n"
        "| `x` | int | (b\\*N) of \\[a\\]\\[b\\] |\n"
        "| `y` | int \\| None | above, in two lines |\n"
        "| `bare` | int |  |"
    )
    assert module["B"].docstring.value == "No comments."


# --- building


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    """The site's settings for docs of a single page: to render the lessons and the reference takes long."""
    folder = tmp_path / "small"
    (folder / "docs").mkdir(parents=True)
    (folder / "docs" / "glossary.md").write_text("# Glossary\n")
    (folder / "marker.py").write_text("from refspec.course.pages import on_post_build\n")
    text = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    for setting, value in {"nav": "[glossary.md]", "hooks": "[marker.py]", "watch": "[]"}.items():
        text, found = re.subn(rf"(?m)^{setting}:.*\n(?: .*\n)*", f"{setting}: {value}\n", text)
        assert found == 1
    (folder / "mkdocs.yml").write_text(text, encoding="utf-8")
    return folder / "mkdocs.yml"


def test_strict_mode_sees_anchors_omitted_pages_and_links(small_config: Path) -> None:
    """All in one build: mkdocs warns of each, and `strict` makes any warning an error."""
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    docs = small_config.parent / "docs"
    with (docs / "glossary.md").open("a") as file:
        file.write("\n[a](omitted.md#gone) [b](gone.md) [c](/gone/) [d](no_extension) [e][refspec.gone]\n")
    (docs / "omitted.md").write_text("# Omitted\n")
    config = load_config(str(small_config), site_dir=str(small_config.parent / "out"))
    assert config.strict
    with site.collected_complaints() as complaints, pytest.raises(Abort):
        mkdocs_build(config)
    said = "\n".join(complaints)
    for fault in ("'omitted.md#gone'", "'gone.md'", "'/gone/'", "'no_extension'", "'refspec.gone'", "  - omitted.md"):
        assert fault in said
    assert len(complaints) == 6, said


def test_a_snippet_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension has an exception of its own, which mkdocs does not know."""
    from markdown import Markdown
    from mkdocs.config import load_config

    def build(config: MkDocsConfig) -> None:
        markdown = Markdown(extensions=["pymdownx.snippets"], extension_configs=config.mdx_configs)
        markdown.convert('--8<-- "gone.md"')

    monkeypatch.setattr("mkdocs.commands.build.build", build)
    assert load_config(str(site.CONFIG)).mdx_configs["pymdownx.snippets"]["check_paths"]
    with pytest.raises(SiteError, match=r"^the site does not build: .*gone\.md") as caught:
        build_site(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_build_does_not_write_into_what_it_reads() -> None:
    with pytest.raises(SiteError, match="is where the site is made from"):
        build_site(REPO / "chapters" / "site")


def test_what_the_site_needs_is_what_its_extra_brings() -> None:
    extra = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
        "site"
    ]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in extra}  # type: ignore[index]
    assert {name.replace("mkdocs-material", "material") for name in names} == set(site.NEEDED)


@pytest.mark.parametrize("inside", ["file", "folder", "not a folder"])
def test_build_leaves_alone_what_is_no_site(tmp_path: Path, inside: str) -> None:
    out = tmp_path / "out"
    if inside == "not a folder":
        out.write_text("precious")
    else:
        (out / "precious").mkdir(parents=True)
        if inside == "file":
            (out / "index.html").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SiteError, match="is not a site that was built here: move it away, or name another folder"):
        build_site(out)
    assert sorted(tmp_path.rglob("*")) == before


def test_build_replaces_an_earlier_site(small_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "CONFIG", small_config)
    out = tmp_path / "new" / "site"
    assert build_site(out).pages == 1
    (out / "outdated.html").touch()
    assert build_site(out).pages == 1
    assert (out / "glossary" / "index.html").exists()
    assert not (out / "outdated.html").exists()
    assert list(out.parent.iterdir()) == [out]


def test_build_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "mkdocs.yml"
    config.write_text("site_name: x\nnav: 7\n")
    monkeypatch.setattr(site, "CONFIG", config)
    out = tmp_path / "site"
    out.mkdir()
    (out / pages.MARKER).touch()
    (out / "index.html").write_text("as before")
    with pytest.raises(SiteError, match="the site does not build: "):
        build_site(out)
    assert (out / "index.html").read_text() == "as before"
    assert {file.name for file in tmp_path.iterdir()} == {"mkdocs.yml", "site"}


def test_missing_packages_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(SiteError, match=r"^the site needs no_such_package: pip install -e '\.\[site\]'$"):
        build_site()


# --- pages that are made


def test_pages_are_made_once_for_each_state_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the child counts its calls; what the real one makes, the built site shows."""
    calls = []

    def child(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command[-2])
        monkeypatch.setattr(pages, "make", lambda unit: {f"{unit}.md": b"# x"})
        return subprocess.CompletedProcess(command, pages.main(command[-2], Path(command[-1])), "", "")

    repo = tmp_path / "repo"
    for name in ("src", "notebooks", "chapters/01_a"):
        (repo / name).mkdir(parents=True)
    for name in ("requirements.lock", "src/a.py", "notebooks/01_n.py", "chapters/01_a/lesson.md"):
        (repo / name).write_text("1")
    for name, path in {"REPOSITORY": "", "SOURCES": "src", "NOTEBOOKS": "notebooks", "CHAPTERS": "chapters"}.items():
        monkeypatch.setattr(pages, name, repo / path)
    monkeypatch.setattr(pages, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(pages.subprocess, "run", child)

    def make_all() -> list[str]:
        calls.clear()
        for unit in pages.units():
            assert pages.pages_of(unit) == {f"{unit}.md": b"# x"}
        return calls.copy()

    assert make_all() == ["chapters", "notebooks/01_n"]
    assert make_all() == []
    (repo / "notebooks" / "01_n.py").write_text("2")
    assert make_all() == ["notebooks/01_n"]
    (repo / "chapters" / "01_a" / "lesson.md").write_text("2")
    assert make_all() == ["chapters"]
    (repo / "src" / "a.py").write_text("2")
    assert make_all() == ["chapters", "notebooks/01_n"]
    assert len(list((tmp_path / "cache").iterdir())) == 2  # no outdated ones


def test_child_says_in_one_line_what_is_wrong_with_a_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(unit: str) -> dict[str, bytes]:
        raise CourseError(f"{unit}: no section")

    monkeypatch.setattr(pages, "make", make)
    assert pages.main("chapters", tmp_path / "a.zip") == pages.REFUSED
    assert capsys.readouterr() == ("", "chapters: no section\n")
    assert list(tmp_path.iterdir()) == []


# --- the whole of it, in a copy of the repository


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Its sources, docs and chapters; no notebooks and no reference, which take long."""
    repo = tmp_path / "repo"
    leave_out = shutil.ignore_patterns("__pycache__", "tiny", "training")
    for name in ("src", "docs", "chapters", "tests/plugin_example"):
        shutil.copytree(REPO / name, repo / name, ignore=leave_out)
    shutil.rmtree(repo / "docs" / "reference")
    (repo / "src" / "refspec" / "models" / "tiny").symlink_to(REPO / "src" / "refspec" / "models" / "tiny")
    shutil.copy(REPO / "requirements.lock", repo)
    (repo / "notebooks").mkdir()
    settings = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    settings, found = re.subn(r"  - Notebooks: .*\n|  - Reference:\n(?:      - .*\n)+", "", settings)
    assert found == 2
    (repo / "mkdocs.yml").write_text(settings, encoding="utf-8")
    return repo


def environment_of(repo: Path) -> dict[str, str]:
    return quiet() | {"PYTHONPATH": str(repo / "src")}


def test_lesson_that_does_not_weave_fails_the_build_in_one_line(copy: Path) -> None:
    lesson = copy / "chapters" / "01_one_round" / "lesson.md"
    line = len(lesson.read_text(encoding="utf-8").splitlines()) + 1
    with lesson.open("a", encoding="utf-8") as file:
        file.write("{{ code no_such_section }}\n")
    process = subprocess.run(
        [*COMMAND, "build"], env=environment_of(copy), cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 1
    assert process.stdout == ""
    assert re.fullmatch(
        rf"refspec: the site does not build: \S*lesson\.md:{line}: [^\n]*no_such_section[^\n]*\n", process.stderr
    )
    assert "Abort" not in process.stderr
    assert not (copy / "site").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch_until(address: str, words: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if words in answer.read().decode():
                    return
        except OSError as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"{address} does not answer") from error
        assert time.monotonic() < deadline, f"{address} has no {words!r}"
        time.sleep(0.2)


def test_serve_follows_a_lesson_and_ends_at_ctrl_c(copy: Path) -> None:
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", str(port)],
        env=environment_of(copy) | {"PYTHONUNBUFFERED": "1"},
        cwd=copy,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        page = f"http://127.0.0.1:{port}/chapters/01_one_round/"
        fetch_until(page, "One round", 100)
        with (copy / "chapters" / "01_one_round" / "lesson.md").open("a", encoding="utf-8") as file:
            file.write("\nAdded while it was being served.\n")
        fetch_until(page, "Added while it was being served.", 100)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert f"http://127.0.0.1:{port}/" in out
    assert "Traceback" not in err


def test_serve_at_a_port_that_is_taken_names_another() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = subprocess.run([*COMMAND, "serve", "--port", str(port)], capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert process.stdout == ""
    found = re.fullmatch(
        rf"refspec: port {port} of 127\.0\.0\.1 is taken: refspec site serve --port (\d+)\n", process.stderr
    )
    assert found
    assert int(found[1]) > port


# --- publishing


def test_workflow_builds_with_its_own_address_and_publishes_what_was_built() -> None:
    import yaml

    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "site.yml").read_text(encoding="utf-8"))
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    [made] = [step for step in build["steps"] if "refspec site build" in step.get("run", "")]
    [address] = [step for step in build["steps"] if step.get("uses", "").startswith("actions/configure-pages")]
    assert made["env"]["SITE_URL"] == f"${{{{ steps.{address['id']}.outputs.base_url }}}}/"
    [upload] = [step for step in build["steps"] if step.get("uses", "").startswith("actions/upload-pages-artifact")]
    assert upload["with"]["path"] == made["run"].split("--out ")[1]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}


def test_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdocs.config import load_config

    monkeypatch.delenv("SITE_URL", raising=False)
    assert load_config(str(site.CONFIG)).site_url == SITE_URL
    monkeypatch.setenv("SITE_URL", "https://example.org/elsewhere/")
    assert load_config(str(site.CONFIG)).site_url == "https://example.org/elsewhere/"
