"""The small repository of `refspec history bisect-demo`: a drafter in plain Python, and the commits that made it.

Its commits are like those of any project: a rename, a file forgotten, type hints, tests. One of them takes two lines
out of the draft loop. What is generated stays as it was, and a round costs one draft forward more.

Commits are edits, and an edit names the text that it replaces, not the file: it finds its place wherever the text is by
then. So the one commit that matters can stand at another place among the others, and all of them still apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GOOD, BAD = "v0.1", "main"  # a tag and a branch: what is known to be as it should be, and what is known not to be
NUM_STEPS = 4  # tokens that a round drafts
FIRST_SECOND = 1_735_732_800  # 2025-01-01 12:00 UTC; each commit comes a day after the one before


@dataclass(frozen=True)
class Write:
    """A new file, or a new text for one."""

    path: str
    text: str


@dataclass(frozen=True)
class Replace:
    """One text for another that stands in exactly one place."""

    old: str
    new: str


@dataclass(frozen=True)
class Move:
    """Another name for a file."""

    old: str
    new: str


@dataclass(frozen=True)
class Change:
    """One commit."""

    subject: str
    edits: tuple[Write | Replace | Move, ...]
    tag: str | None = None


def _behind(anchor: str, added: str) -> Replace:
    return Replace(anchor, anchor + added)


def _before(anchor: str, added: str) -> Replace:
    return Replace(anchor, added + anchor)


def history(where: int) -> list[Change]:
    """All commits, the oldest first. The commit that costs a forward is the `where`-th behind v0.1.

    Raises ValueError if it cannot stand there.
    """
    if where not in PLACES:
        raise ValueError(
            f"the commit can be at 1 to {PLACES[-1]} but not at {UNRUNNABLE} or {UNRUNNABLE + 1}, where others "
            f"have to be: {where}"
        )
    fixed = {where: _SLOWER, UNRUNNABLE: _BROKEN, UNRUNNABLE + 1: _REPAIR}
    others = iter(_AFTER)
    return [*_BEFORE, *(fixed.get(place) or next(others) for place in range(1, BEHIND + 1))]


def trees(changes: Sequence[Change]) -> Iterator[dict[str, str]]:
    """The files after each commit: path -> text. Raises ValueError for an edit that does not apply."""
    files: dict[str, str] = {}
    for change in changes:
        for edit in change.edits:
            if isinstance(edit, Write):
                files[edit.path] = edit.text
            elif isinstance(edit, Move):
                files[edit.new] = files.pop(edit.old)
            else:
                holders = [path for path, text in files.items() if edit.old in text]
                if len(holders) != 1 or files[holders[0]].count(edit.old) != 1:
                    raise ValueError(f"{change.subject}: {edit.old!r} is not in exactly one place")
                files[holders[0]] = files[holders[0]].replace(edit.old, edit.new)
        yield dict(files)


_MODEL = '''\
"""Two models that need no weights."""

SIZE = 97  # of the vocabulary


class TargetModel:
    def forward(self, tokens):
        """The token behind these."""
        return (3 * tokens[-1] + 7 * len(tokens)) % SIZE


class DraftModel:
    """Guesses what the target says; at every fifth position it is wrong."""

    def forward(self, tokens):
        right = (3 * tokens[-1] + 7 * len(tokens)) % SIZE
        return right if len(tokens) % 5 else (right + 1) % SIZE
'''

_DRAFT = '''\
class Drafter:
    def __init__(self, model, num_steps):
        self.model = model
        self.num_steps = num_steps

    def extend(self, tokens):
        """Shows the model what was accepted. Returns its guess at what follows."""
        return self.model.forward(tokens)

    def draft(self, tokens, first):
        """num_steps guesses, of which the extend has made the first."""
        guesses = []
        guess = first
        for step in range(self.num_steps):
            guesses.append(guess)
            guess = self.model.forward(tokens + guesses)
        return guesses
'''

# What every draft loop that does not waste a forward has in it. One commit brings it, and one takes it away.
_LAST_STEP = """\
            if step == self.num_steps - 1:
                break
"""

_VERIFY = '''\
def verify(target, tokens, guesses):
    """The target's own tokens, up to the first that was not guessed."""
    accepted = []
    for guess in [*guesses, None]:
        accepted.append(target.forward(tokens + accepted))
        if accepted[-1] != guess:
            break
    return accepted
'''

_MAIN = f'''\
from draft import Drafter
from model import DraftModel, TargetModel


{_VERIFY}

def generate(prompt, count, num_steps):
    """`count` tokens, and in how many rounds they came."""
    target, drafter = TargetModel(), Drafter(DraftModel(), num_steps)
    tokens, rounds = list(prompt), 0
    guess = drafter.extend(tokens)
    while len(tokens) < len(prompt) + count:
        guesses = drafter.draft(tokens, guess)
        tokens += verify(target, tokens, guesses)
        guess = drafter.extend(tokens)
        rounds += 1
    return tokens[len(prompt) :][:count], rounds


if __name__ == "__main__":
    print(generate([1, 2, 3], 20, 4))
'''

_RUN = """\
import sys

from engine import generate

if __name__ == "__main__":
    print(generate([1, 2, 3], 20, int(sys.argv[1])))
"""

TEST = "test_generate.py"  # python runs it, and it passes at every commit that has it and can be run
_TEST = """\
from main import generate
from model import TargetModel


def plainly(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(TargetModel().forward(tokens))
    return tokens[len(prompt) :]


def test_drafts_change_nothing():
    for num_steps in (1, 2, 4, 7):
        tokens, rounds = generate([1, 2, 3], 40, num_steps)
        assert tokens == plainly([1, 2, 3], 40)
        assert rounds <= 40


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
"""

_CLOCK = """\
import time


class Clock:
    def __init__(self):
        self.times = [time.perf_counter()]

    def round_is_over(self):
        self.times.append(time.perf_counter())
"""

_BEFORE = (
    Change("Two models that need no weights", (Write("model.py", _MODEL), Write("README.md", "# A drafter\n"))),
    Change("The draft loop", (Write("draft.py", _DRAFT),)),
    Change("Verification, and rounds until there is enough", (Write("main.py", _MAIN),)),
    Change("A test: drafts change nothing", (Write(TEST, _TEST),)),
    Change("Nobody reads the draft loop's last forward", (_behind("            guesses.append(guess)\n", _LAST_STEP),)),
    Change(
        "Count the draft's forwards",
        (
            _before(
                "    def forward(self, tokens):\n        right",
                "    def __init__(self):\n        self.forwards = 0\n\n",
            ),
            _before("        right =", "        self.forwards += 1\n"),
        ),
        tag=GOOD,
    ),
)

_SLOWER = Change("Simplify the draft loop", (Replace(_LAST_STEP, ""),))

# The second half of such a commit is easily forgotten. Until it comes, nothing can be run.
_BROKEN = Change(
    "Say how long a round takes",
    (
        _before("from drafter import", "from clock import Clock\n"),
        _before("    guess = drafter.extend(tokens)\n    while", "    clock = Clock()\n"),
        _behind("        rounds += 1\n", "        clock.round_is_over()\n"),
    ),
)
_REPAIR = Change("Add clock.py, which the last commit forgot", (Write("clock.py", _CLOCK),))

_AFTER = (
    Change("README: how to run it", (_behind("# A drafter\n", "\nRun `python main.py`.\n"),)),
    Change("Ignore bytecode", (Write(".gitignore", "__pycache__/\n"),)),
    Change(
        "SIZE is the size of the vocabulary: say so",
        (
            Replace("SIZE = 97  # of the vocabulary", "VOCABULARY = 97"),
            Replace("return (3 * tokens[-1] + 7 * len(tokens)) % SIZE", "return following(tokens)"),
            Replace("right = (3 * tokens[-1] + 7 * len(tokens)) % SIZE", "right = following(tokens)"),
            Replace("(right + 1) % SIZE", "(right + 1) % VOCABULARY"),
            _before(
                "class TargetModel",
                "def following(tokens):\n    return (3 * tokens[-1] + 7 * len(tokens)) % VOCABULARY\n\n\n",
            ),
        ),
    ),
    Change("draft.py becomes drafter.py", (Move("draft.py", "drafter.py"), Replace("from draft ", "from drafter "))),
    Change("A docstring for the drafter", (_behind("class Drafter:\n", '    """Guesses ahead of the target."""\n\n'),)),
    Change(
        "num_steps from the command line",
        (
            _before("from drafter import", "import sys\n\n"),
            Replace("print(generate([1, 2, 3], 20, 4))", "print(generate([1, 2, 3], 20, int(sys.argv[1])))"),
            Replace("`python main.py`", "`python main.py 4`"),
        ),
    ),
    Change(
        "Refuse to draft less than one token",
        (
            _before(
                "        self.model = model\n",
                '        if num_steps < 1:\n            raise ValueError("num_steps is 1 or more")\n',
            ),
        ),
    ),
    Change(
        "Test prompts of one token",
        (
            _before(
                'if __name__ == "__main__":\n    for',
                "def test_short():\n    assert generate([5], 9, 3)[0] == plainly([5], 9)\n\n\n",
            ),
        ),
    ),
    Change(
        "first -> first_guess",
        (
            Replace("(self, tokens, first)", "(self, tokens, first_guess)"),
            Replace("guess = first\n", "guess = first_guess\n"),
        ),
    ),
    Change(
        "Say why the draft reads its own guesses",
        (
            _before(
                "        for step in range(self.num_steps):\n",
                "        # What the target will say is not known yet: the next guess builds on this one.\n",
            ),
        ),
    ),
    Change("README: what a round is", (_behind("# A drafter\n", "\nA round drafts, verifies, extends.\n"),)),
    Change(
        "The draft's mistakes become a setting",
        (
            Replace(
                "    def __init__(self):\n",
                "    def __init__(self, wrong_every=5):\n        self.wrong_every = wrong_every\n",
            ),
            Replace("if len(tokens) % 5 else", "if len(tokens) % self.wrong_every else"),
            Replace("at every fifth position", "at every `wrong_every`-th position"),
        ),
    ),
    Change(
        "Verification has a file of its own",
        (
            Replace(f"{_VERIFY}\n\n", ""),
            Write("verify.py", _VERIFY),
            _behind("import DraftModel, TargetModel\n", "from verify import verify\n"),
        ),
    ),
    Change(
        "Test verification",
        (
            _before("\n\ndef plainly", "from verify import verify\n"),
            _before(
                "def test_short",
                "def test_wrong_guess():\n    assert verify(TargetModel(), [1], [96]) == plainly([1], 1)\n\n\n",
            ),
        ),
    ),
    Change(
        "Type hints for the models",
        (
            Replace("def following(tokens):", "def following(tokens: list[int]) -> int:"),
            Replace('forward(self, tokens):\n        """', 'forward(self, tokens: list[int]) -> int:\n        """'),
            Replace("forward(self, tokens):\n        self", "forward(self, tokens: list[int]) -> int:\n        self"),
        ),
    ),
    Change(
        "Type hints for the drafter",
        (
            Replace("def extend(self, tokens):", "def extend(self, tokens: list[int]) -> int:"),
            Replace("(self, tokens, first_guess):", "(self, tokens: list[int], first_guess: int) -> list[int]:"),
        ),
    ),
    Change("And for what it collects", (Replace("        guesses = []\n", "        guesses: list[int] = []\n"),)),
    Change(
        "Type hints for generate",
        (
            Replace(
                "(prompt, count, num_steps):",
                "(prompt: list[int], count: int, num_steps: int) -> tuple[list[int], int]:",
            ),
        ),
    ),
    Change("README: a sentence on types", (_behind("extends.\n", "\nThe code has type hints.\n"),)),
    Change(
        "Generation has a file of its own",
        (
            Move("main.py", "engine.py"),
            Replace('\n\nif __name__ == "__main__":\n    print(generate([1, 2, 3], 20, int(sys.argv[1])))\n', ""),
            Replace("import sys\n\nfrom clock", "from clock"),
            Write("main.py", _RUN),
        ),
    ),
    Change(
        "Say what the argument is",
        (_before("    print(generate", '    if len(sys.argv) != 2:\n        sys.exit("one argument: num_steps")\n'),),
    ),
    Change(
        "Test that no more is returned than was asked for",
        (_before("def test_wrong_guess", "def test_count():\n    assert len(generate([1, 2], 7, 4)[0]) == 7\n\n\n"),),
    ),
    Change(
        "The prompt must not be empty",
        (
            _before(
                "    tokens, rounds = list", '    if not prompt:\n        raise ValueError("the prompt is empty")\n'
            ),
        ),
    ),
    Change(
        "A docstring for following",
        (_behind("def following(tokens: list[int]) -> int:\n", '    """The token behind these, by the target."""\n'),),
    ),
    Change(
        "README: how to test it", (Replace("`python main.py 4`.", f"`python main.py 4`; `python {TEST}` tests it."),)
    ),
    Change("Version 0.2", (Write("VERSION", "0.2\n"),)),
)

BEHIND = len(_AFTER) + 3  # commits behind v0.1
UNRUNNABLE = 14  # where the commit that cannot run stands among them: in the middle, where a bisection begins
PLACES = [place for place in range(1, BEHIND + 1) if place not in (UNRUNNABLE, UNRUNNABLE + 1)]
USUAL_PLACE = 22
