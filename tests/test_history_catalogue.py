"""The embedded catalogue: facts that agree with one another, in a format that is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from refspec.history import catalogue
from refspec.history.catalogue import CatalogueError


@pytest.fixture
def own_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the catalogue that a test may damage."""
    (tmp_path / "facts").mkdir()
    for file in (Path(catalogue.__file__).parent / "facts").iterdir():
        (tmp_path / "facts" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(catalogue, "__file__", str(tmp_path / "catalogue.py"))
    cached = [catalogue.reach, catalogue.commits, catalogue.releases, catalogue.story, catalogue.claims]
    for function in cached:
        function.cache_clear()
    yield tmp_path / "facts"
    for function in cached:
        function.cache_clear()


def test_every_file_reads() -> None:
    assert len(catalogue.commits()) == 637
    assert len(catalogue.releases()) == 160
    assert len(catalogue.story()) == 31
    assert len(catalogue.claims()) == 77
    assert len(catalogue.wheels()) == 17


def test_the_last_commit_is_within_reach() -> None:
    assert catalogue.commits()[-1].committer_date[:10] <= catalogue.reach().date
    assert len({commit.hash for commit in catalogue.commits()}) == 637


def test_releases_and_commits_tell_the_same_of_the_folder() -> None:
    """Files come and go from release to release; whatever a release on the main line holds, commits brought."""
    alive: set[str] = set()
    by_day = sorted(catalogue.releases(), key=lambda release: release.committer_date)
    commits = list(catalogue.commits())
    checked = 0
    for release in by_day:
        if not release.on_main or not release.files:
            continue
        ever = {change.path for commit in commits for change in commit.changes if change.status in "AR"}
        alive = {f"{catalogue.DIRECTORY}/{name}" for name in release.files}
        assert alive <= ever, release.version
        checked += 1
    assert checked > 50


def test_the_story_is_among_the_commits_where_it_touches_the_folder() -> None:
    known = catalogue.commits_by_hash()
    told = [known[commit.hash] for commit in catalogue.story() if commit.hash in known]
    assert len(told) >= 28
    for commit in catalogue.story():
        if commit.lines_added and commit.hash in known:
            assert (known[commit.hash].lines_added, known[commit.hash].lines_deleted) == (
                commit.lines_added,
                commit.lines_deleted,
            )


def test_a_rename_keeps_both_names() -> None:
    rename = next(commit for commit in catalogue.commits() if commit.pr == 10735)
    assert [(c.old_path, c.path) for c in rename.changes if c.status == "R"] == [
        (f"{catalogue.DIRECTORY}/eagle_utils.py", f"{catalogue.DIRECTORY}/eagle_info.py")
    ]


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("format.json", '"format": 1', '"format": 2', "the catalogue has format 2, and this refspec reads 1"),
        ("commits.tsv", "subject", "title", "the catalogue's commits.tsv has other columns than"),
        ("commits.tsv", "\t2024-12-29T00:45:57-08:00\t2024", "\tyesterday\t2024", "line 2 .*'yesterday' has another"),
        ("commits.tsv", "3815b23ccb", "zzz5b23ccb", "line 2 of the catalogue's commits.tsv is damaged: 'zzz5b23ccb"),
        ("story.tsv", "1\t3815b23ccb", "one\t3815b23ccb", "line 2 .* 'one' has another form"),
        ("claims.tsv", "study notes: EAGLE integration", "hearsay", "line 2 .* 'hearsay'"),
        ("release_files.tsv", "\t19\n", "\t20\n", r"0.4.1.post2: its files do not add up"),
    ],
)
def test_a_damaged_catalogue_is_told_by_the_line(
    own_facts: Path, file: str, old: str, new: str, complaint: str
) -> None:
    text = (own_facts / file).read_text(encoding="utf-8")
    assert old in text, "the trap is set"
    (own_facts / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CatalogueError, match=complaint):
        catalogue.commits(), catalogue.story(), catalogue.claims(), catalogue.releases()
