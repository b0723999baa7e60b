"""Files that would pass without being right: none of them does, and the judge goes on working.

The function of each is wrong; what surrounds it tries to have it taken for right.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import refspec
from refspec.grader.exercise import find_exercise
from refspec.grader.judge import Judge, call
from refspec.grader.limits import Limits
from refspec.grader.problems import problem_of

EXERCISE = find_exercise("walk_tree")
SOURCES = str(Path(refspec.__file__).parents[1])

WRONG = """
def walk_tree(candidates, index, child, sibling, choice, num_steps):
    b, n = candidates.shape
    return [0] * (b * n), [[-1] * (num_steps + 1)] * b, [0] * b
"""

IMPORTS = "import atexit, builtins, ctypes, gc, json, os, signal, sys, threading, time, types\nimport torch\n"

# The right answer to the first example, written by hand as child.py would write it.
FORGED = r"""
FORGED = b'{"loaded": true}\n' + b"".join(
    b'{"case": %d, "value": [[7, 0, 9, 4], [[0, 2, 3]], [2]], "inputs": {}}\n' % i for i in range(44)
)

def everywhere(data):
    for fd in range(256):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""

FORGERIES = {
    "leaves with 0 while it is loaded": "os._exit(0)",
    "leaves with 0 when it is called": "def walk_tree(*args): os._exit(0)",
    "leaves by an exception": "def walk_tree(*args): raise SystemExit(0)",
    "is interrupted": "def walk_tree(*args): raise KeyboardInterrupt",
    "writes a forged reply while it is loaded": FORGED + "everywhere(FORGED)\nos._exit(0)",
    "writes a forged reply and goes on": FORGED + "everywhere(FORGED)" + WRONG,
    "writes a forged reply when it is called": FORGED
    + "def walk_tree(*args):\n    everywhere(FORGED)\n    os._exit(0)",
    "prints that it has passed": "print('passed'); print('{\"verdict\": \"pass\"}')" + WRONG,
    "closes every file": WRONG.replace("b, n", "os.closerange(0, 4096)\n    b, n", 1),
    "writes what is no message": "def walk_tree(*args):\n    [os.write(fd, b'\\xff\\n' * 99) for fd in (3, 4, 5)]",
    "replies with NaN": "def walk_tree(*args): return [float('nan')] * 3",
    "replies with too much": "def walk_tree(*args): return torch.zeros(4 << 20, dtype=torch.int64), [], []",
    "patches comparison": """
torch.equal = torch.allclose = lambda *a, **k: True
torch.Tensor.__eq__ = lambda *a: torch.tensor(True)
import numpy
numpy.array_equal = numpy.allclose = numpy.isclose = lambda *a, **k: True
builtins.all = builtins.any = lambda *a: True
"""
    + WRONG,
    "patches json": "json.dumps = json.loads = lambda *a, **k: {'verdict': 'pass'}\n" + WRONG,
    "patches the harness": """
for name, module in list(sys.modules.items()):
    if name.startswith("refspec.grader"):
        for attribute in dir(module):
            if callable(getattr(module, attribute, None)) and not attribute.startswith("__"):
                setattr(module, attribute, lambda *a, **k: {"value": None, "inputs": {}})
"""
    + WRONG,
    "patches the harness's functions found by gc": """
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType) and (thing.__module__ or "").startswith("refspec.grader"):
        thing.__code__ = (lambda *a, **k: None).__code__
"""
    + WRONG,
    "empties sys.modules": "sys.modules.clear()\n" + WRONG,
    "replaces the harness's modules": """
for name in list(sys.modules):
    if name.startswith("refspec"):
        sys.modules[name] = types.ModuleType(name)
"""
    + WRONG,
    "traces": """
def trace(frame, event, arg):
    for name in ("right", "expected", "answer", "verdict"):
        if name in frame.f_locals:
            frame.f_locals[name] = "pass"
    return trace
sys.settrace(trace)
threading.settrace(trace)
"""
    + WRONG,
    "looks for expected values in all frames": """
def walk_tree(*args):
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for name in ("expected", "right", "reference", "solution"):
                if name in scope:
                    found = scope[name]
                    return found(*args) if callable(found) else found
        frame = frame.f_back
    raise LookupError("there is none")
""",
    "looks for a function like the solution among all objects": """
def walk_tree(*args):
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and thing.__name__ in (
            "verify_tree_greedy", "verify_tree_greedy_torch", "call", "find_fault", "draw"
        ):
            return thing(*args)
    raise LookupError("there is none")
""",
    "equals everything": """
class Equal:
    __class__ = tuple
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __len__(self): return 3
    def __iter__(self): return iter([self] * 3)
    def __getitem__(self, i): return self
    def __array__(self, *a, **k): raise RuntimeError
    def tolist(self): return self
def walk_tree(*args): return Equal()
""",
    "is a tensor that equals everything": """
class Equal(torch.Tensor):
    def __eq__(self, other): return torch.ones_like(self, dtype=torch.bool)
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return True
def walk_tree(*args): return tuple(torch.zeros(4).as_subclass(Equal) for _ in range(3))
""",
    "is an integer that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = None
def walk_tree(candidates, *args):
    b, n = candidates.shape
    return [Equal(0)] * (b * n), [[Equal(0)] * (args[-1] + 1)] * b, [Equal(0)] * b
""",
    "changes the inputs to fit its answer": """
def walk_tree(candidates, index, child, sibling, choice, num_steps):
    b, n = candidates.shape
    child.fill_(-1), choice.fill_(0)
    answer = [0] * (b * n), [[r * n] + [-1] * num_steps for r in range(b)], [0] * b
    return answer
""",
    "writes later, from a thread": FORGED
    + """
threading.Thread(target=lambda: [everywhere(FORGED) or time.sleep(0.01) for _ in range(50)]).start()
"""
    + WRONG,
    "writes later, at exit": FORGED + "atexit.register(everywhere, FORGED)" + WRONG,
    "leaves a process that writes later": FORGED
    + """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for _ in range(200):
            everywhere(FORGED)
            time.sleep(0.05)
    os._exit(0)
"""
    + WRONG,
    "leaves a process that answers in its place": FORGED
    + """
def walk_tree(*args):
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.3)
        everywhere(FORGED)
    os._exit(0)
""",
    "stops the judge's process": "os.kill(os.getppid(), signal.SIGTERM)" + WRONG,
    "ends the judge's process": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(30)",
    "ends the judge's process when it is called": "def walk_tree(*args): os.kill(os.getppid(), signal.SIGKILL)",
    "takes away the limits": """
import resource
for limit in (resource.RLIMIT_CPU, resource.RLIMIT_DATA):
    resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
    + WRONG,
    "ignores the signals that end it": """
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
    "imports the solution": "from refspec.kernels import verify_tree_greedy as walk_tree",
    "imports the solution behind the judge's back": """
sys.meta_path[:] = [finder for finder in sys.meta_path if "refspec" not in type(finder).__module__]
def walk_tree(*args): return "found"
""",
    "crashes": "ctypes.string_at(0)",
    "ends by a signal without a name": "os.kill(os.getpid(), 35)",
    "replies with a shape beyond NumPy's bounds": FORGED.replace(
        "[[7, 0, 9, 4]", '[{"array": ["int64", [0, 2147483647, 2147483647, 2147483647], ""]}'
    )
    + "everywhere(FORGED)\nos._exit(0)",
    "recurses for ever": "def walk_tree(*args): return walk_tree(*args)",
    "returns the examples' answers": None,
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """One nursery for all tests here, and a new one where it has been ended."""
    with Judge(Limits(seconds=2), seed=1) as judge:
        yield judge


def forgery(name: str) -> str:
    source = FORGERIES[name]
    if source is None:
        right = [call(EXERCISE.reference(), case) for case in problem_of("walk_tree").examples]
        table = [[part.tolist() for part in answer] for answer in right]
        source = f"""
TABLE = {table}
def walk_tree(candidates, *_): return TABLE[len(candidates) - 1 if len(candidates) < 3 else 0]
"""
    return IMPORTS + source


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_passes_and_the_next_one_is_judged(judge: Judge, name: str) -> None:
    result = judge.grade_text(EXERCISE, forgery(name).encode(), "answer.py")
    assert result.verdict in ("fail", "error", "timeout")
    right = judge.grade_text(EXERCISE, EXERCISE.solution_text().encode(), "answer.py")
    assert right.verdict == "pass", right.headline
    process = judge.sandbox._process
    assert process is not None
    assert psutil.Process(process.pid).children(recursive=True) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an orphan in a session of its own is out of reach")
def test_a_daemon_ends_with_the_run_also_where_the_answer_is_right(judge: Judge, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    daemon = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        with open({str(note)!r}, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
while not (os.path.exists({str(note)!r}) and open({str(note)!r}).read()):
    time.sleep(0.01)
"""
    source = EXERCISE.solution_text() + IMPORTS + daemon
    result = judge.grade_text(EXERCISE, source.encode(), "answer.py")
    assert result.verdict == "pass", result.headline
    assert not is_running(int(note.read_text()))


def test_a_lost_nursery_is_named(judge: Judge) -> None:
    source = forgery("ends the judge's process").encode()
    result = judge.grade_text(EXERCISE, source, "answer.py")
    assert (result.verdict, result.headline) == (
        "error",
        "the process that runs exercises was ended while it ran this one",
    )


def test_a_lost_nursery_leaves_no_child(tmp_path: Path) -> None:
    """It cannot end its children any more; we find them by their environment."""
    note = tmp_path / "pids"
    source = f"""
    import os, signal, time
    if os.fork() == 0:
        os.setsid()
    with open({str(note)!r}, "a") as file:
        file.write(f"{{os.getpid()}} ")
    time.sleep(0.5)
    os.kill(int(os.environ["NURSERY"]), signal.SIGKILL)
    time.sleep(60)
    """
    with Judge() as judge:
        judge.grade_text(EXERCISE, EXERCISE.solution_text().encode(), "answer.py")
        assert judge.sandbox._process is not None
        source = source.replace('os.environ["NURSERY"]', str(judge.sandbox._process.pid))
        result = judge.grade_text(EXERCISE, textwrap.dedent(source).encode(), "answer.py")
    assert result.verdict == "error"
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """A zombie that nobody has asked after is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_stopped_nursery_is_given_up() -> None:
    with Judge(Limits(seconds=0.5)) as judge:
        source = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass\n"
        assert judge.grade_text(EXERCISE, source.encode(), "answer.py").verdict == "error"
        assert judge.grade_text(EXERCISE, EXERCISE.solution_text().encode(), "answer.py").verdict == "pass"


def test_the_nursery_holds_no_solution_and_no_case(judge: Judge) -> None:
    look = (
        "print(*sorted(name for name in sys.modules if name.startswith('refspec')))\n"
        "    print(*{type(thing).__module__ for thing in gc.get_objects()} & {'refspec.grader.problems'})\n    b, n"
    )
    source = IMPORTS + WRONG.replace("b, n", look, 1)
    result = judge.grade_text(EXERCISE, source.encode(), "answer.py")
    modules = set(result.printed.split())
    assert "refspec.grader.child" in modules
    assert not {
        name for name in modules if name.startswith(("refspec.kernels", "refspec.spec", "refspec.grader.problems"))
    }
    assert not modules & {"refspec.grader.judge", "refspec.grader.exercise", "refspec.grader.sandbox"}


def test_a_file_that_ends_the_grader_has_not_passed(tmp_path: Path) -> None:
    """The command itself, as another user's script would call it."""
    (tmp_path / "walk_tree.py").write_text(
        "import os, psutil, signal\n"
        "for process in psutil.Process().parents()[1:2]:\n"
        "    process.send_signal(signal.SIGKILL)\n" + WRONG
    )
    command = [sys.executable, "-m", "refspec", "grade", "walk_tree", "--submission", str(tmp_path), "--json"]
    environment = {**os.environ, "PYTHONPATH": SOURCES, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert ended.returncode != 0
    assert b'"pass"' not in ended.stdout
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and nurseries(tmp_path):
        time.sleep(0.05)
    assert nurseries(tmp_path) == []


def test_nothing_is_imported_from_the_folder_where_it_is_started(tmp_path: Path) -> None:
    """`python -m` has it first among the places to look; what lies there may be what is to be judged."""
    (tmp_path / "walk_tree.py").write_text(WRONG)
    for name in ("psutil", "torch", "numpy", "rich", "typer", "json"):
        (tmp_path / f"{name}.py").write_text("import os\nprint('{\"passed\": 1}', flush=True)\nos._exit(0)\n")
    command = [sys.executable, "-m", "refspec", "grade", "walk_tree", "--submission", "."]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "0 of 1 exercise passed" in ended.stdout


def nurseries(folder: Path) -> list[psutil.Process]:
    """Those whose grader was given this folder for temporary files; other tests may have some at the same time."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "refspec.grader.nursery" in (process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("TMPDIR") == str(folder)
    ]
