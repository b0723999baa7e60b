"""The full-screen explorer: commits, files, story, releases and months as lists, beside them what a row is about.

One screen, five tabs, one search line. Everything is there without a clone but the messages and the diffs. Whatever
another person wrote goes through `printable`, and none of it is read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from refspec.cli.history.commit_view import pr_link
from refspec.cli.history.output import ascii_only, bar, shown
from refspec.cli.history.patch_view import coloured
from refspec.cli.wording import plural
from refspec.history import catalogue
from refspec.history.catalogue import DIRECTORY, Commit, Release, StoryCommit
from refspec.history.clone import Clone, HistoryError
from refspec.history.file_life import FileLife, lives_of_files
from refspec.history.log import by_month, day
from refspec.history.revisions import find
from refspec.history.show import details
from refspec.history.sources import Source
from refspec.history.story import commentary
from refspec.printable import printable

LONGEST_PATCH = 2000  # lines shown at once; a longer one is cut, and says so
BAR = 16  # cells of the longest bar
LISTS = ("commits", "files", "story", "releases", "months")
WIDE = 110  # columns from which on list and pane stand side by side


def matches(commit: Commit, words: str) -> bool:
    """Does every one of the words say something of the commit?

    A word may be part of the title or of a file's path, "#" and a pull request's number, or the beginning of a hash or
    of the author's date; or several of these with "|" between them, of which one is enough. The options of `log` choose
    more exactly (`refspec.history.log.Choice`); here all of it is typed into one line, while one looks at the list.
    """
    text = " ".join([commit.subject, *_paths(commit)]).lower()

    def says(word: str) -> bool:
        if word.startswith("#"):
            return word == f"#{commit.pr}"
        return word in text or commit.hash.startswith(word) or commit.author_date.startswith(word)

    return all(any(map(says, word.strip("|").split("|"))) for word in words.lower().split())


class Explorer(App[None]):
    """Lists on one side, what the chosen row is about on the other.

    source: what answers. commits: those of the folder, the oldest first; of the clone if there is one, else of the
    catalogue. Nothing is read from the clone before a row asks for it, and that in a thread of its own.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "refspec history explore"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 - so textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('commits')", "Commits"),
        Binding("2", "tab('files')", "Files"),
        Binding("3", "tab('story')", "Story"),
        Binding("4", "tab('releases')", "Releases"),
        Binding("5", "tab('months')", "Months"),
        Binding("slash", "search", "Search"),
        Binding("d", "toggle_diff", "Diff"),
        Binding("tab", "switch_side", "Text", priority=True),
        Binding("escape", "leave", "Back", show=False),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]
    CSS = """
    Screen { layout: vertical; }
    #where { height: 1; background: $panel; padding: 0 1; }
    #body { height: 1fr; }
    .-wide #body { layout: horizontal; }
    .-wide TabbedContent { width: 1fr; height: 1fr; }
    .-wide #pane { width: 1fr; height: 1fr; border-left: solid $panel; }
    .-narrow #body { layout: vertical; }
    .-narrow TabbedContent { height: 1fr; }
    .-narrow #pane { height: 1fr; border-top: solid $panel; }
    #pane { padding: 0 1; scrollbar-size: 1 1; }
    #pane:focus { background: $boost; }
    TabPane { padding: 0; }
    DataTable { height: 1fr; overflow-x: hidden; scrollbar-size: 1 1; }
    #search { height: 1; border: none; padding: 0 1; display: none; }
    #search.open { display: block; }
    """

    def __init__(self, source: Source, commits: Sequence[Commit]) -> None:
        super().__init__()
        self.source = source
        self.commits = list(commits)
        self.by_hash = {commit.hash: commit for commit in self.commits}
        self.files = {str(number): life for number, life in enumerate(_sorted(lives_of_files(self.commits)))}
        self.story = {commit.label: commit for commit in catalogue.story()}
        held = [release for release in catalogue.releases() if release.files]
        self.releases = {release.version: release for release in held}
        self.before = {release.version: earlier for earlier, release in zip([None, *held], held, strict=False)}
        self.months: dict[str, list[Commit]] = {month: [] for month in by_month(self.commits)}
        for commit in self.commits:
            self.months.get(day(commit)[:7], []).append(commit)
        self.shows_diff = False
        self.asked: str | None = None  # the commit that the clone is asked about
        self.in_ascii = ascii_only()  # asked now: later, stdout is not the terminal

    # --- the screen

    def compose(self) -> ComposeResult:
        """The line of the source, the five lists, the pane of text, the search line, the keys."""
        yield Static(self._where(), id="where", markup=False)
        with Container(id="body"):
            with TabbedContent(initial="commits"):
                for name in LISTS:
                    with TabPane(name.capitalize(), id=name):
                        yield DataTable(id=f"{name}-list", cursor_type="row", zebra_stripes=False)
            with VerticalScroll(id="pane", can_focus=True):
                yield Static(id="text", markup=False)
        yield Input(placeholder="words of the title, a file, #PR, a day (2026-06) or a hash", id="search")
        yield Footer(compact=True)  # with all keys in 80 columns

    def on_mount(self) -> None:
        """Fills the lists. The newest commit is the first row; the story begins at its beginning."""
        self._fill("commits", ("Day", "PR", "+", "-", "Title"), [self._commit_row(c) for c in reversed(self.commits)])
        self._fill(
            "files", ("Commits", "From", "To", "File"), [_file_row(key, life) for key, life in self.files.items()]
        )
        self._fill("story", ("", "Day", "PR", "Title"), [_story_row(commit) for commit in self.story.values()])
        most = max((sum(release.files.values()) for release in self.releases.values()), default=1)
        rows = [_release_row(release, most, self.in_ascii) for release in reversed(self.releases.values())]
        self._fill("releases", ("Release", "Day", "Files", "Lines", ""), rows)
        most = max(map(len, self.months.values()), default=1)
        months = [
            _month_row(month, len(commits), most, self.in_ascii) for month, commits in reversed(self.months.items())
        ]
        self._fill("months", ("Month", "Commits", ""), months)
        self.query_one("#commits-list").focus()

    def _fill(self, name: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> None:
        table = self.query_one(f"#{name}-list", DataTable)
        if not table.columns:
            table.add_columns(*columns)
        table.clear()
        for key, cells in rows:
            table.add_row(*(Text(shown(cell), no_wrap=True) for cell in cells), key=key)

    def _where(self) -> str:
        clone = self.source.clone
        if clone:
            return shown(f"{clone.folder}, {clone.main.name}: {len(self.commits)} commits of {DIRECTORY}")
        folder = "/".join(PurePosixPath(DIRECTORY).parts[-2:])
        return f"no clone; catalogue to {catalogue.reach().date}: {len(self.commits)} commits of {folder}"

    def _commit_row(self, commit: Commit) -> tuple[str, Sequence[str]]:
        plus, minus = (f"{'' if n is None else n:>4}" for n in (commit.lines_added, commit.lines_deleted))
        return commit.hash, (commit.author_date[:10], _pr(commit.pr), plus, minus, commit.subject)

    # --- what the chosen row is about

    @on(DataTable.RowHighlighted)
    def show_row(self, event: DataTable.RowHighlighted) -> None:
        """Tells what the row is about, if its list is the one in front."""
        # The row may have gone since: a search goes on while one types.
        table, key = event.data_table, event.row_key
        if table.id == f"{self._tab}-list" and key in table.rows and key.value is not None:
            self._show(key.value)

    @on(TabbedContent.TabActivated)
    def show_tab(self) -> None:
        """Tells what the chosen row of the list in front is about."""
        if not self.query_one("#search").has_focus:
            self._list.focus()
        self.refresh_bindings()
        self._show_chosen()

    @on(DataTable.RowSelected)
    def follow_row(self, event: DataTable.RowSelected) -> None:
        """Enter or a click: of a file the commits that touched it, of a month its commits, of all else the text."""
        key = event.row_key.value
        if self._tab == "files" and key is not None:
            folder = PurePosixPath(DIRECTORY).parent
            self._search_for("|".join(path.removeprefix(f"{folder}/") for path in self.files[key].paths))
        elif self._tab == "months" and key is not None:
            self._search_for(key)
        else:
            self.query_one("#pane").focus()

    @property
    def _tab(self) -> str:
        return self.query_one(TabbedContent).active

    @property
    def _list(self) -> DataTable[Text]:
        return self.query_one(f"#{self._tab}-list", DataTable)

    def _show_chosen(self) -> None:
        table = self._list
        if table.row_count == 0:
            self._tell(Text("Nothing here matches."))
            return
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        if key is not None:
            self._show(key)

    def _show(self, key: str) -> None:
        if self._tab == "files":
            self._tell(_about_file(self.files[key]))
        elif self._tab == "releases":
            self._tell(_about_release(self.releases[key], self.before[key]))
        elif self._tab == "months":
            self._tell(_about_month(key, self.months[key]))
        elif self._tab == "story":
            told = self.story[key]
            self._tell_commit(told.hash, _about_story(told))
        else:
            self._tell_commit(key, _about_commit(self.by_hash[key]))

    def _tell(self, text: Text) -> None:
        self.workers.cancel_group(self, "clone")
        self.asked = None
        self._write(text)

    def _tell_commit(self, commit: str, facts: Text) -> None:
        """The facts at once, and what the clone adds to them when it is there. The diff stands in their place."""
        if self.shows_diff:
            facts = facts.split("\n", include_separator=True)[0]
        self._tell(facts)
        if self.source.clone:
            self.asked = commit
            self._read(self.source.clone, commit, facts)
        elif self.shows_diff:
            self._write(facts + _note("The diff needs a clone of SGLang: refspec history clone makes one."))

    @work(thread=True, exclusive=True, group="clone")
    def _read(self, clone: Clone, commit: str, facts: Text) -> None:
        try:
            clone.commit(commit)
            # Of a commit that leaves the folder alone, all of it.
            everything = commit not in self.by_hash
            known = details(self.source, find(self.source, commit), contents=self.shows_diff, all_files=everything)
            if not self.shows_diff:
                more = Text(f"\n{printable(known.body or '')}\n")
            elif known.comparison is None or not known.comparison.whole:
                more = _note(". ".join(known.lacks) or "What it changed is not known.")
            else:
                more = _patch("\n".join(file.patch for file in known.comparison.files))
        except HistoryError as error:
            more = _note(str(error))
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self._answer, commit, facts + more)

    def _answer(self, commit: str, text: Text) -> None:
        if commit == self.asked:  # else another row was chosen meanwhile
            self._write(text)

    def _write(self, text: Text) -> None:
        self.query_one("#text", Static).update(text)
        self.query_one("#pane").scroll_home(animate=False)

    # --- keys

    def action_tab(self, name: str) -> None:
        """Brings a list to the front."""
        self.query_one(TabbedContent).active = name

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The key for the diff is there where a row is a commit."""
        return action != "toggle_diff" or self._tab in ("commits", "story")

    def action_toggle_diff(self) -> None:
        """The diff instead of the message, or the message again."""
        self.shows_diff = not self.shows_diff
        self._show_chosen()

    def action_switch_side(self) -> None:
        """From the list to the text, and back."""
        (self._list if self.query_one("#pane").has_focus else self.query_one("#pane")).focus()

    def action_search(self) -> None:
        """Opens the search line, over the commits."""
        self.action_tab("commits")
        search = self.query_one("#search", Input)
        search.add_class("open")
        search.focus()

    def action_leave(self) -> None:
        """Out of the search, which ends it, or out of the text."""
        search = self.query_one("#search", Input)
        if search.has_class("open"):
            search.value = ""
            search.remove_class("open")
        self._list.focus()

    def _search_for(self, words: str) -> None:
        self.action_search()
        self.query_one("#search", Input).value = words
        self.query_one("#commits-list").focus()

    @on(Input.Changed, "#search")
    def filter_commits(self, event: Input.Changed) -> None:
        """Leaves the commits that the words match."""
        found = [commit for commit in reversed(self.commits) if matches(commit, event.value)]
        self._fill("commits", (), [self._commit_row(commit) for commit in found])
        said = f"{len(found)} of {len(self.commits)} commits match; Esc ends the search"
        self.query_one("#where", Static).update(said if event.value else self._where())
        self._show_chosen()

    @on(Input.Submitted, "#search")
    def end_typing(self) -> None:
        """To the list; what was searched for stays."""
        self._list.focus()


def _paths(commit: Commit) -> Iterator[str]:
    for change in commit.changes:
        yield change.path
        if change.old_path:
            yield change.old_path


def _sorted(lives: Iterable[FileLife]) -> list[FileLife]:
    return sorted(lives, key=lambda life: (life.paths[-1].lower(), life.alive))


def _name(path: str) -> str:
    return path.removeprefix(f"{DIRECTORY}/")


def _file_row(key: str, life: FileLife) -> tuple[str, Sequence[str]]:
    first, last = life.events[0].author_date[:10], life.events[-1].author_date[:10]
    return key, (f"{len(life.events):>7}", first, "" if life.alive else last, _name(life.paths[-1]))


def _month_row(month: str, commits: int, most: int, in_ascii: bool) -> tuple[str, Sequence[str]]:
    return month, (month, f"{commits:>7}", bar(round(commits / most * BAR), in_ascii))


def _story_row(commit: StoryCommit) -> tuple[str, Sequence[str]]:
    return commit.label, (commit.label, commit.author_date, _pr(commit.pr), commit.subject)


def _release_row(release: Release, most: int, in_ascii: bool) -> tuple[str, Sequence[str]]:
    lines = sum(release.files.values())
    return release.version, (
        release.version,
        release.committer_date[:10],
        f"{len(release.files):>5}",
        f"{lines:>5}",
        bar(round(lines / most * BAR), in_ascii),
    )


def _about_commit(commit: Commit) -> Text:
    text = Text()
    text.append(f"{printable(commit.subject)}\n\n", "bold")
    text.append(f"commit    {commit.hash}\nauthored  {commit.author_date}\ncommitted {commit.committer_date}\n")
    if commit.pr:
        text.append("pull      ").append(f"{pr_link(commit.pr)}\n", f"link {pr_link(commit.pr)}")
    if commit.lines_added is not None:
        text.append(f"lines     +{commit.lines_added} -{commit.lines_deleted} in the folder\n")
    if commit.boundary:
        text.append("Its parents are not in this clone, which is shallow: what it changed is not known.\n")
    text.append("\n")
    for change in commit.changes:
        name = printable(change.path.removeprefix(f"{DIRECTORY}/"))
        was = f"  (was {printable(change.old_path.removeprefix(f'{DIRECTORY}/'))})" if change.old_path else ""
        text.append(f"{change.status} {name}{was}\n")
    return text


def _about_story(told: StoryCommit) -> Text:
    text = Text()
    text.append(f"{told.label}. {printable(told.subject)}\n", "bold")
    text.append(f"{told.author_date}  {told.hash}  ")
    text.append(f"#{told.pr}\n\n", f"link {pr_link(told.pr)}")
    text.append(f"{told.why}\n\n", "italic")
    said = commentary()[told.label]
    text.append("\n\n".join(said.paragraphs) + "\n\n")
    for look in said.looks:
        text.append("Look at ").append(look.path, "bold").append(f": {', '.join(look.names)}\n")
    if said.modules:
        text.append(f"In refspec: {', '.join(said.modules)}\n")
    if said.claims:
        text.append(f"Claims that it decides: {', '.join(said.claims)} (refspec history claims)\n")
    return text


def _about_file(life: FileLife) -> Text:
    text = Text()
    text.append(f"{shown(_name(life.paths[-1]))}\n", "bold")
    for path in life.paths[-2::-1]:
        text.append(f"before: {shown(_name(path))}\n")
    text.append(f"\n{plural(len(life.events), 'commit')}; Enter lists {'it' if len(life.events) == 1 else 'them'}\n\n")
    for event in reversed(life.events):
        text.append(f"{event.author_date[:10]}  {_pr(event.pr):>6}  {shown(event.subject)}\n")
    return text


def _about_month(month: str, commits: Sequence[Commit]) -> Text:
    text = Text()
    text.append(f"{month}\n\n", "bold")
    text.append(f"{plural(len(commits), 'commit')}; Enter lists {'it' if len(commits) == 1 else 'them'}\n\n")
    for commit in reversed(commits):
        text.append(f"{day(commit)}  {_pr(commit.pr):>6}  {shown(commit.subject)}\n")
    return text


def _about_release(release: Release, before: Release | None) -> Text:
    text = Text()
    text.append(f"{release.version}\n\n", "bold")
    text.append(f"commit {release.commit}, {release.committer_date[:10]}\n")
    if not release.on_main:
        text.append(f"on a branch of its own, {release.commits_off_main} commits off the main line\n")
    held = {} if before is None else before.files
    text.append("\n")
    for name in sorted(release.files | held):
        if name not in held:
            text.append(f"+ {name}  {release.files[name]} lines\n", "green")
        elif name not in release.files:
            text.append(f"- {name}\n", "red")
        else:
            grown = release.files[name] - held[name]
            text.append(f"  {name}  {release.files[name]} lines{f' ({grown:+})' if grown else ''}\n")
    return text


def _patch(patch: str) -> Text:
    """A patch with its lines in the colours that people know."""
    lines = patch.removesuffix("\n").split("\n")
    text = Text("\n")
    for segment in coloured(lines[:LONGEST_PATCH]):
        text.append(segment.text, segment.style)
    if len(lines) > LONGEST_PATCH:
        text += _note(f"{len(lines) - LONGEST_PATCH} more lines: refspec history show prints them all")
    return text


def _note(words: str) -> Text:
    return Text(f"\n{printable(words)}\n", "dim")


def _pr(number: int | None) -> str:
    return f"#{number}" if number else ""
