"""scripts/start.sh and scripts/test.sh: what they make, what they leave alone, what they say when something is wrong.

Each test runs the real scripts in a copy of the repository's outline, on a PATH that holds a few system tools and
FAKE_PYTHON: an interpreter that makes environments and installs into them in no time. `test_with_real_python` does
without the fake.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[1]
TOOLS = "awk basename bash cat chmod cmp df dirname grep mkdir mv readlink rm rmdir sh sleep tail".split()

# Answers as the Python that FAKE_VERSION names. `-m venv DIR` puts a copy of itself into DIR; what is run there through
# `-m` is noted in the file $CALLS. FAKE_PIP is a shell command that `pip install` runs before it succeeds.
FAKE_PYTHON = f"""#!/bin/sh
case "$*" in
  --version) echo "Python ${{FAKE_VERSION:-3.12.1}}" ;;
  *ensurepip*) [ -z "$FAKE_NO_VENV" ] ;;
  -c*) exec "{sys.executable}" "$@" ;;
  "-m venv "*) mkdir "$3/bin" && echo home >"$3/pyvenv.cfg" && cat "$0" >"$3/bin/python" && chmod +x "$3/bin/python" ;;
  "-m pip "*)
    echo "$*" >>"$CALLS"
    eval "$FAKE_PIP" || exit
    printf '#!/bin/sh\\necho "refspec $*"\\n' >"$(dirname "$0")/refspec" && chmod +x "$(dirname "$0")/refspec" ;;
  *) echo "$*" >>"$CALLS" ;;
esac
"""


class Outline:
    """A copy of the repository's outline, and a machine to run its scripts on."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a path with späces"
        self.venv = self.root / ".venv"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        shutil.copytree(REPO / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for name in ("pyproject.toml", "requirements.lock", "requirements-cuda.lock"):
            (self.root / name).touch()
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or f"{tool} is not on this machine")
        (folder / "home").mkdir()
        self.env = {"PATH": str(self.bin), "HOME": str(folder / "home"), "CALLS": str(self.calls_file)}
        self.tool("python3", FAKE_PYTHON)

    def tool(self, name: str, text: str) -> None:
        """Puts a program of ours on PATH."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, script: Path | str, *args: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *args],
            env=self.env | env,
            cwd=self.root.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C can be sent to it and all that it runs
        )

    def run(self, script: Path | str = "start.sh", *args: str, **env: str) -> str:
        """Runs a script that is to succeed; what it prints."""
        process = self.start(script, *args, **env)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
        return out

    def refuse(self, script: str = "start.sh", *args: str, **env: str) -> str:
        """Runs a script that is to fail, and to say why in one line; that line."""
        process = self.start(script, *args, **env)
        out, err = process.communicate(timeout=60)
        assert process.returncode != 0, out + err
        assert re.fullmatch(rf"{script}: error: [^\n]+\n", err), err
        return err

    def calls(self) -> list[str]:
        """What was run through `-m` in .venv since the last time this was asked."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [call.split(" --no-input --progress-bar off")[0].removeprefix("-m ") for call in calls]


@pytest.fixture
def outline(tmp_path: Path) -> Outline:
    return Outline(tmp_path)


# --- what they do


def test_start_runs_doctor_and_demo_then_serves_the_site(outline: Outline) -> None:
    out = outline.run("start.sh")
    served = re.search(r"\nrefspec site serve --port 80\d\d\n\Z", out)
    assert served
    ran = [out.index(f"\nrefspec {command}\n") for command in ("doctor", "demo", "site build")]
    assert ran == sorted(ran)
    assert ran[-1] < served.start()
    assert "refspec start 01" in out
    assert outline.calls() == ["pip install", "pip install"]


def test_start_does_not_serve_if_asked_not_to(outline: Outline) -> None:
    out = outline.run("start.sh", "--no-serve")
    assert "\nrefspec site build\n" in out
    assert "\nrefspec site serve" not in out
    assert out.endswith("refspec site serve\n"), "it says how to have it"


def test_start_takes_the_next_port_where_8000_is_taken(outline: Outline) -> None:
    with socket.socket() as holder:
        with contextlib.suppress(OSError):  # then somebody else holds it
            holder.bind(("127.0.0.1", 8000))
            holder.listen()
        out = outline.run("start.sh")
    taken = re.search(r"port 8000 is taken: taking (80\d\d)\n", out)
    assert taken
    assert out.endswith(f"\nrefspec site serve --port {taken[1]}\n")


@pytest.mark.parametrize("command", ["doctor", "demo", "site"])
def test_start_stops_where_a_command_fails(outline: Outline, command: str) -> None:
    outline.run("start.sh", "--no-serve")
    refspec = outline.venv / "bin" / "refspec"
    refspec.write_text(f'#!/bin/sh\n[ "$1" != {command} ]\n')
    assert f"refspec {command} " in outline.refuse("start.sh")


def test_test_runs_checks_then_pytest(outline: Outline) -> None:
    outline.run("test.sh")
    assert outline.calls()[2:] == ["ruff check .", "ruff format --check .", "mypy", "pytest -n 2 --dist worksteal"]


def test_test_with_arguments_runs_only_pytest(outline: Outline) -> None:
    outline.run("test.sh", "tests/a b.py", "-q")
    assert outline.calls()[2:] == ["pytest tests/a b.py -q"]


def test_second_run_installs_nothing(outline: Outline) -> None:
    outline.run()
    outline.calls()
    assert outline.run().splitlines()[0] == "start.sh: refspec doctor"
    assert outline.calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock", "requirements-cuda.lock"])
def test_changed_pins_are_installed_into_the_same_venv(outline: Outline, name: str) -> None:
    outline.run()
    (outline.venv / "kept").touch()
    outline.calls()
    (outline.root / name).write_text("# changed\n")
    outline.run()
    assert outline.calls() == ["pip install", "pip install"]
    assert (outline.venv / "kept").exists()


def test_called_through_a_symlink_from_elsewhere(outline: Outline, tmp_path: Path) -> None:
    (tmp_path / "go").symlink_to(Path("a path with späces") / "scripts" / "start.sh")
    outline.run(tmp_path / "go")
    assert (outline.venv / "bin" / "refspec").exists()


def test_caches_stay_here_without_a_home_to_write_to(outline: Outline) -> None:
    outline.run(HOME="/nonexistent", FAKE_PIP='echo "$PIP_CACHE_DIR"')
    assert f"{outline.root}/.cache/pip\n" in (outline.venv / "install.log").read_text()


@pytest.mark.parametrize("script", ["start.sh", "test.sh"])
def test_help_changes_nothing(outline: Outline, script: str) -> None:
    assert f"usage: scripts/{script}" in outline.run(script, "--help")
    assert not outline.venv.exists()


def test_with_real_python(outline: Outline) -> None:
    """Real environments and a real pip. It installs a package of two lines, so it needs no network."""
    (outline.root / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    (outline.root / "backend.py").write_text(
        "import zipfile\n"
        "def build_editable(folder, config_settings=None, metadata_directory=None):\n"
        "    info = 'refspec-1.dist-info/'\n"
        "    with zipfile.ZipFile(folder + '/refspec-1-py3-none-any.whl', 'w') as wheel:\n"
        "        wheel.writestr('refspec.py', 'def app():\\n    print(\"really\", *sys.argv[1:])\\nimport sys\\n')\n"
        "        wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: refspec\\nVersion: 1\\n')\n"
        "        wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        wheel.writestr(info + 'entry_points.txt', '[console_scripts]\\nrefspec = refspec:app\\n')\n"
        "        wheel.writestr(info + 'RECORD', '')\n"
        "    return 'refspec-1-py3-none-any.whl'\n"
    )
    outline.env |= {"PYTHON": sys.executable, "HOME": "/nonexistent"}
    assert "really doctor\n" in outline.run()
    assert "installing" not in outline.run()

    next(outline.venv.glob("lib/*/site-packages/refspec.py")).unlink()
    out = outline.run()
    assert "making it again" in out
    assert "really demo\n" in out


# --- what they do about a .venv that is there already


def hurt_python(outline: Outline) -> None:
    (outline.venv / "bin" / "python").unlink()
    (outline.venv / "bin" / "python").symlink_to("/nonexistent/python3")


def hurt_pip(outline: Outline) -> None:
    (outline.venv / "bin" / "python").write_text("#!/bin/sh\necho No module named pip >&2\nexit 1\n")


def move_repository(outline: Outline) -> None:
    moved = outline.root.with_name("moved")
    outline.root.rename(moved)
    outline.root, outline.venv = moved, moved / ".venv"


def wish_for_another_python(outline: Outline) -> None:
    outline.env |= {"PYTHON": "python3.13"}
    outline.tool("python3.13", FAKE_PYTHON.replace(":-3.12.1", ":-3.13.0"))


@pytest.mark.parametrize("harm", [hurt_python, hurt_pip, move_repository, wish_for_another_python])
def test_own_venv_that_will_not_do_is_made_again(outline: Outline, harm: Callable[[Outline], None]) -> None:
    outline.run()
    harm(outline)
    (outline.venv / "old").touch()
    assert "making it again" in outline.run()
    assert not (outline.venv / "old").exists()


def test_own_venv_outlives_a_download_that_fails(outline: Outline) -> None:
    outline.refuse(FAKE_PIP="echo Downloading all; false")
    outline.calls()
    assert "making" not in outline.run()
    assert outline.calls() == ["pip install", "pip install"]


def test_half_unpacked_venv_is_made_again(outline: Outline) -> None:
    outline.refuse(FAKE_PIP="echo Installing collected packages: all; false")
    assert "making it again" in outline.run()
    assert "making" not in outline.run()


def test_own_venv_that_is_active_and_broken(outline: Outline) -> None:
    outline.run()
    (outline.venv / "bin" / "python3").write_text("#!/bin/sh\necho Python 3.12.1\n")  # answers, and does nothing more
    (outline.venv / "bin" / "python3").chmod(0o755)
    hurt_python(outline)
    outline.run(PATH=f"{outline.venv / 'bin'}:{outline.bin}")


def make_foreign_venv(outline: Outline) -> None:
    outline.run()
    (outline.venv / ".made-by-refspec").unlink()
    (outline.venv / ".installed-from").unlink()
    (outline.venv / "precious").touch()


def test_foreign_venv_that_works_is_used(outline: Outline) -> None:
    make_foreign_venv(outline)
    assert "using the .venv that is here" in outline.run()
    assert (outline.venv / "precious").exists()


def test_foreign_venv_that_is_broken_is_moved_aside(outline: Outline) -> None:
    make_foreign_venv(outline)
    hurt_python(outline)
    (outline.root / ".venv.old").mkdir()
    assert "moving it to .venv.old2" in outline.run()
    assert (outline.root / ".venv.old2" / "precious").exists()


def test_something_else_called_venv_is_refused(outline: Outline, tmp_path: Path) -> None:
    outline.venv.mkdir()
    (outline.venv / "precious").touch()
    assert "is not a virtual environment" in outline.refuse()
    assert (outline.venv / "precious").exists()

    shutil.rmtree(outline.venv)
    outline.venv.write_text("precious")
    assert "is not a virtual environment" in outline.refuse()
    assert outline.venv.read_text() == "precious"

    outline.venv.unlink()
    outline.venv.symlink_to(tmp_path / "unmounted")
    assert "is not a virtual environment" in outline.refuse()
    assert outline.venv.is_symlink()


def test_empty_folder_called_venv_is_nobodys(outline: Outline) -> None:
    outline.venv.mkdir()
    outline.run()


# --- two at once, and Ctrl-C


def test_two_at_once_install_once(outline: Outline) -> None:
    first = outline.start("start.sh", FAKE_PIP="sleep 0.5")
    second = outline.start("test.sh", "-q", FAKE_PIP="sleep 0.5")
    out = first.communicate(timeout=60)[0] + second.communicate(timeout=60)[0]
    assert (first.returncode, second.returncode) == (0, 0), out
    assert "is at work on .venv: waiting for it" in out
    assert sorted(outline.calls()) == ["pip install", "pip install", "pytest -q"]


def test_ctrl_c_stops_and_the_next_run_recovers(outline: Outline) -> None:
    process = outline.start("start.sh", FAKE_PIP="echo Installing collected packages: all; sleep 60")
    while not (outline.venv / ".unpacking").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err == "\nstart.sh: stopped; to go on, run it again\n"
    assert "making it again" in outline.run()


# --- what they say when something is wrong


def test_unknown_option(outline: Outline) -> None:
    assert "unknown option --serve" in outline.refuse("start.sh", "--serve")
    assert not outline.venv.exists()


def test_no_python(outline: Outline) -> None:
    (outline.bin / "python3").unlink()
    assert "Python 3.11 to 3.14 is needed (none found)" in outline.refuse()


@pytest.mark.parametrize("version", ["2.7.18", "3.9.18", "3.15.0"])
def test_unsupported_python(outline: Outline, version: str) -> None:
    assert f"is needed (python3 is Python {version})" in outline.refuse(FAKE_VERSION=version)


def test_unsupported_python_is_passed_over(outline: Outline) -> None:
    outline.tool("python3", "#!/bin/sh\necho Python 3.9.18\n")
    outline.tool("python3.13", "#!/bin/sh\necho pyenv: python3.13: command not found >&2\nexit 127\n")
    outline.tool("python3.11", FAKE_PYTHON.replace(":-3.12.1", ":-3.11.2"))
    assert "making .venv with Python 3.11.2" in outline.run()


def test_python_named_by_the_user_is_the_only_choice(outline: Outline) -> None:
    assert "(/nonexistent/python3 does not run)" in outline.refuse(PYTHON="/nonexistent/python3")


def test_no_venv_module(outline: Outline) -> None:
    assert "apt install python3-venv" in outline.refuse(FAKE_NO_VENV="1")
    assert not outline.venv.exists()


@pytest.mark.parametrize(
    ("pip", "line"),
    [
        ("echo 'WARNING: Retrying after connection broken by NewConnectionError'; false", "no network"),
        ("echo 'ERROR: [Errno 28] No space left on device' >&2; false", "no disk space left"),
        ("echo 'ERROR: No matching distribution found for torch'; false", "No matching distribution found for torch"),
    ],
)
def test_pip_fails(outline: Outline, pip: str, line: str) -> None:
    message = outline.refuse(FAKE_PIP=pip)
    assert line in message
    if "disk space" not in message:
        assert f"report: {outline.venv / 'install.log'}" in message


def test_too_little_disk_space_is_said_before_anything_is_made(outline: Outline) -> None:
    outline.tool("df", "#!/bin/sh\necho Filesystem\necho '/dev/a disk 2000000 1000000 1000000 50% /a mount point'\n")
    assert "has 976 MB free" in outline.refuse()
    assert not outline.venv.exists()


def test_repository_that_cannot_be_written_to(outline: Outline) -> None:
    (outline.root / ".venv.lock").mkdir()  # root, as whom CI runs, may write in spite of any permission
    assert f"cannot write to {outline.root}" in outline.refuse()


def test_test_stops_at_the_first_complaint(outline: Outline) -> None:
    outline.run()
    python = outline.venv / "bin" / "python"
    python.write_text(FAKE_PYTHON.replace("case", '[ "$2" != mypy ] || exit 1\ncase', 1))
    assert "mypy has complaints" in outline.refuse("test.sh")
    assert "pytest" not in outline.calls()


# --- the lock


def pins(*files: str) -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for file in files for line in (REPO / file).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    assert all(str(pin.specifier).startswith("==") for pin in found), "every pin is exact"
    return {canonicalize_name(pin.name): pin for pin in found}


def test_lock_is_complete_and_satisfies_pyproject() -> None:
    locked, locked_for_cuda = pins("requirements.lock"), pins("requirements-cuda.lock")
    installed = [name for name, pin in locked.items() if pin.marker is None or pin.marker.evaluate()]
    for name in ["refspec", *installed]:
        for wanted in map(Requirement, metadata.requires(name) or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": "dev" if name == "refspec" else ""}):
                pin = (locked | locked_for_cuda)[canonicalize_name(wanted.name)]
                assert wanted.specifier.contains(str(pin.specifier).removeprefix("==")), f"{name} wants {wanted}"
