"""A lesson becomes a page, or the build fails and says where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from refspec.chapters import Chapter, CourseError, find_chapter, find_chapters
from refspec.course import weave
from refspec.course.sections import Section, find_sections
from refspec.course.weave import read_commits, weave_chapter, weave_course
from refspec.trace import Trace

COMMIT = """
[[commit]]
hash = "815dce0554793d0788faf4eaacf0c7271c070e95"
date = "2025-01-02"
pr = 2150
title = "part 4 | worker"
changed = "A worker."
"""
REPLAY = "{{{{ replay prompt=x topk={k} num_steps=3 num_draft_tokens={n} max_new_tokens=9 round={round} }}}}"


def chapter_with(folder: Path, lesson: str, commits: str = COMMIT) -> Chapter:
    (folder / "lesson.md").write_text(lesson, encoding="utf-8")
    (folder / "commits.toml").write_text(commits, encoding="utf-8")
    (folder / "exercises").mkdir(exist_ok=True)
    return Chapter(folder)


def woven(folder: Path, lesson: str, sections: dict[str, Section] | None = None) -> str:
    return weave_chapter(chapter_with(folder, lesson), sections).markdown


def test_prose_stays_as_it_is(tmp_path: Path) -> None:
    lesson = "# A\n\nText with `{braces}` and\n\n    code\n"
    assert woven(tmp_path, lesson) == lesson


def test_code_comes_from_the_sources(tmp_path: Path) -> None:
    page = woven(tmp_path, "# A\n\n{{ code one_round }}\n")
    section = find_sections()["one_round"]
    assert section.code in page
    title = re.search(r'title="src/refspec/workers/eagle_v1\.py, lines (\d+) to (\d+)"', page)
    assert title
    lines = section.file.read_text(encoding="utf-8").splitlines()
    assert lines[int(title[1]) - 1].strip().startswith("def _round(")
    assert lines[int(title[2]) - 1].strip() == "return going_on"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{{ code nowhere }}", "there is no section nowhere"),
        ("{{ code one_round }} and more", "have its line to itself"),
        ("see {{ code one_round }}", "have its line to itself"),
        ("{{ coed one_round }}", "there is no directive 'coed'"),
        ("{{ }}", "there is no directive"),
        ("{{ code one_round", "must be closed"),
        ("{{ code }}", "one name must follow, not 0"),
        ("{{ code 'one }}", "No closing quotation"),
        ("{{ figure nothing }}", "there is no figure nothing"),
        ("{{ example nothing }}", "there is no table nothing"),
        ("{{ exercise nothing }}", "there is no exercise nothing"),
        ("{{ replay prompt=x }}", "replay takes just these"),
        (
            "{{ replay prompt=x topk=4 num_steps=3 num_draft_tokens=99 max_new_tokens=9 round=0 }}",
            "num_draft_tokens is 99",
        ),
        ("{{ replay prompt=x topk=a num_steps=3 num_draft_tokens=4 max_new_tokens=9 round=0 }}", "'a'"),
        ("{{ replay prompt=x topk=1 num_steps=3 num_draft_tokens=4 max_new_tokens=9 round=70 }}", "has no round 70"),
        ("{{ quiz }}", r"cannot read .*quiz\.toml"),
        ("{{ commits now }}", "nothing may follow"),
    ],
)
def test_a_directive_that_cannot_be_followed_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(CourseError, match=complaint) as caught:
        woven(tmp_path, f"# A\n\n{line}\n")
    if "quiz" not in line:
        assert "lesson.md:3: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_lesson_without_a_heading_or_not_in_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"lesson\.md has no heading"):
        woven(tmp_path, "Text.\n")
    chapter = chapter_with(tmp_path, "")
    chapter.lesson.write_bytes(b"# A\xe9\n")
    with pytest.raises(CourseError, match=r"cannot read .*lesson\.md: .*utf-8"):
        weave_chapter(chapter)


def test_a_section_that_no_lesson_includes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = find_sections()
    orphan = Section("orphan", Path("somewhere.py"), 7, 9, "x = 1")
    monkeypatch.setattr(weave, "find_sections", lambda: {**sections, "orphan": orphan})
    with pytest.raises(CourseError, match=r"somewhere\.py:7: section orphan is in no lesson"):
        weave_course()


def test_a_replay_carries_its_trace_whole(tmp_path: Path) -> None:
    page = woven(
        tmp_path, '# A\n\n{{ replay prompt="x = </" topk=2 num_steps=2 num_draft_tokens=4 max_new_tokens=9 round=1 }}\n'
    )
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', page)
    trace = Trace.model_validate(json.loads(data))
    assert len(trace.rounds) >= 2
    assert 'data-round="1"' in page
    assert "</" not in data


def test_commits_become_rows_with_links(tmp_path: Path) -> None:
    page = woven(tmp_path, "# A\n\n{{ commits }}\n")
    assert (
        "[`815dce0554`](https://github.com/sgl-project/sglang/commit/815dce0554793d0788faf4eaacf0c7271c070e95)" in page
    )
    assert r"part 4 \| worker ([#2150](https://github.com/sgl-project/sglang/pull/2150)) | A worker. |" in page


@pytest.mark.parametrize(
    ("commits", "complaint"),
    [
        (COMMIT.replace("2150", '"?"'), "pr: Input should be a valid integer"),
        (COMMIT.replace("[[commit]]", ""), "commit: Field required"),
        ("commit = 5\n", "commit: Input should be a valid list"),
        ("commit = [1]\n", r"commit\.0: Input should be"),
        (COMMIT + "why = 1\n", "why: Extra inputs"),
        (COMMIT.replace("815dce0554793d0788faf4eaacf0c7271c070e95", "815dce05"), "hash: String should match"),
        (COMMIT.replace("2025-01-02", "2 January"), "date: String should match"),
        ("[[commit", "commits.toml"),
    ],
)
def test_bad_commits_are_refused(tmp_path: Path, commits: str, complaint: str) -> None:
    with pytest.raises(CourseError, match=complaint):
        read_commits(chapter_with(tmp_path, "", commits))


@pytest.mark.parametrize("chapter", find_chapters(), ids=lambda chapter: chapter.name)
def test_every_chapter_has_all_its_parts(chapter: Chapter) -> None:
    lesson = chapter.lesson.read_text(encoding="utf-8")
    for directive in ("{{ code ", "{{ quiz }}", "{{ commits }}", "{{ exercise "):
        assert directive in lesson
    headings = ("Before you read", "Predict, then run", "Often said, but wrong", "Explain it in a minute", "Summary")
    for heading in headings:
        assert f"\n## {heading}\n" in lesson
    assert "{{ figure " in lesson or "{{ replay " in lesson
    assert "```python" not in lesson, "code is woven in, never pasted"


def test_the_course_weaves_and_leaves_no_directive() -> None:
    pages = weave_course()
    assert set(pages) == {chapter.name for chapter in find_chapters()}
    for page in pages.values():
        assert "{{" not in page.markdown


def test_weaving_twice_gives_the_same_page() -> None:
    chapter = find_chapter("01")
    assert weave_chapter(chapter) == weave_chapter(chapter)
