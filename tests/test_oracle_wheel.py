"""SGLang's wheels in the cache: absent, damaged, wrong, hostile, interrupted, fetched twice at once. No network: the
wheels here are made up, and so is the pip that brings them.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import refspec
from refspec.oracle import wheel
from refspec.oracle.wheel import Wheel, WheelError

KERNEL = "sglang/kernels/ops/speculative/made_up.py"
FILES = {
    KERNEL: "A = 1\n",
    "sglang/kernels/ops/speculative/notes.txt": "no source",
    "sglang/srt/server.py": "not needed",
    "sglang-1.0.dist-info/licenses/LICENSE": "as it may be",
}
PARTS = ("sglang/kernels/ops/", "sglang-1.0.dist-info/licenses/")
Pip = Callable[[str], None]


def made_up_wheel(file: Path, files: dict[str, str] = FILES) -> Wheel:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Wheel("1.0", "sglang-1.0-py3-none-any.whl", digest, file.stat().st_size, PARTS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "made_up.whl"


@pytest.fixture
def pinned(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A made-up wheel in `file`, pinned in place of SGLang's; the cache is empty."""
    pinned = made_up_wheel(file)
    monkeypatch.setattr(wheel, "WHEELS", {pinned.version: pinned})
    return pinned


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """What `python -m pip` runs from now on."""
    folder = tmp_path / "fakes" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))

    def pip(code: str) -> None:
        start = "import sys, os, shutil\nto = sys.argv[sys.argv.index('--dest') + 1]\nos.makedirs(to)\n"
        (folder / "__main__.py").write_text(start + code)

    return pip


def bring(file: Path) -> str:
    """A pip that has the wheel."""
    return f"shutil.copy({str(file)!r}, to)"


def statuses() -> list[str]:
    return [state.status for state in wheel.states()]


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


# --- where ------------------------------------------------------------------------------------------------------------


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path / "mine"))
    assert wheel.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("REFSPEC_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert wheel.cache_folder() == tmp_path / "xdg" / "refspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wheel.cache_folder() == tmp_path / ".cache" / "refspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert wheel.cache_folder() == tmp_path / ".cache" / "refspec"
    monkeypatch.setenv("REFSPEC_CACHE", "~/x")
    assert wheel.cache_folder() == tmp_path / "x"
    monkeypatch.setenv("REFSPEC_CACHE", "~no-such-user/x")
    with pytest.raises(WheelError, match="set REFSPEC_CACHE to the full path of a folder"):
        wheel.cache_folder()


def test_a_cache_that_cannot_be_written_to(pinned: Wheel, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFSPEC_CACHE", str(file))  # a file, not a folder
    with pytest.raises(WheelError, match=r"cannot write to .*REFSPEC_CACHE"):
        wheel.fetch()


# --- well -------------------------------------------------------------------------------------------------------------


def test_fetch_keeps_what_is_needed_and_nothing_else(pinned: Wheel, file: Path, pip: Pip, cache: Path) -> None:
    assert statuses() == ["absent"]
    assert wheel.folders() == {}
    pip(bring(file) + f"\nprint(sys.argv, file=open({str(file.with_suffix('.args'))!r}, 'w'))")
    seen: list[tuple[str, int, int]] = []
    (state,) = wheel.fetch(lambda *progress: seen.append(progress))
    assert (state.status, state.detail, state.remedy) == ("ready", "", None)
    assert wheel.folders() == {"1.0": cache / "1.0" / "sglang"}
    there = {str(path.relative_to(cache / "1.0")) for path in (cache / "1.0").rglob("*") if path.is_file()}
    assert there == {KERNEL, "sglang-1.0.dist-info/licenses/LICENSE", "manifest.json"}
    assert (cache / "1.0" / KERNEL).read_text() == FILES[KERNEL]
    assert left_behind(cache) == ["1.0"]
    assert seen[0][0] == "downloading SGLang 1.0"
    assert seen[-1] == ("unpacking SGLang 1.0", len(FILES[KERNEL]) + 12, len(FILES[KERNEL]) + 12)
    arguments = file.with_suffix(".args").read_text()
    for argument in ("sglang==1.0", "--no-deps", "--only-binary=:all:", "'3.11'", "manylinux_2_34_x86_64"):
        assert argument in arguments


def test_of_pips_settings_those_for_the_download_hold(
    pinned: Wheel, file: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name in ("PIP_REQUIREMENT", "PIP_CONSTRAINT", "PIP_PYTHON", "PIP_NO_BINARY", "PIP_INDEX_URL", "PIP_RETRIES"):
        monkeypatch.setenv(name, "what was set")
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    there = file.with_suffix(".environment")
    pip(
        bring(file)
        + f"\nprint({{k: v for k, v in os.environ.items() if k[:4] == 'PIP_'}}, file=open({str(there)!r}, 'w'))"
    )
    wheel.fetch()
    assert ast.literal_eval(there.read_text()) == {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_INDEX_URL": "what was set",
        "PIP_REQUIRE_HASHES": "0",
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_RETRIES": "what was set",
    }


def test_the_real_pip_is_what_is_run(pinned: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for a version of SGLang that it cannot have: it may look nowhere."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    with pytest.raises(WheelError, match=r"pip says: No matching distribution found for sglang==1\.0"):
        wheel.fetch()


def test_what_is_ready_is_not_fetched_again(pinned: Wheel, file: Path, pip: Pip) -> None:
    wheel.take([file])
    pip("sys.exit('asked in vain')")
    assert [state.status for state in wheel.fetch()] == ["ready"]


def test_a_wheel_that_the_user_brings(pinned: Wheel, file: Path, cache: Path) -> None:
    renamed = file.rename(file.with_name("whatever.bin"))
    assert [state.status for state in wheel.take([renamed])] == ["ready"]
    assert renamed.exists()


# --- not well ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "print('WARNING: Retrying (Retry(total=1)) after connection broken by NewConnectionError(...)\\n"
            "ERROR: No matching distribution found for sglang==1.0', file=sys.stderr); sys.exit(1)",
            "pip cannot reach its package index",
        ),
        ("sys.exit('No module named pip')", r"this Python has no pip \(`python -m ensurepip` brings it\)"),
        (f"sys.exit('ERROR: [Errno 28] {os.strerror(errno.ENOSPC)}')", "no space is left where"),
        ("sys.exit('ERROR: that version was withdrawn')", "pip says: that version was withdrawn"),
        ("os._exit(7)", r"pip ended with status 7\. "),
        ("print('Usage: pip\\n\\nno such option: -x\\n'); sys.exit(2)", "pip ended with status 2: no such option: -x"),
        ("pass", "pip ended with status 0"),
    ],
)
def test_a_pip_that_fails(pinned: Wheel, pip: Pip, cache: Path, code: str, words: str) -> None:
    pip(code)
    with pytest.raises(WheelError, match=f"^SGLang 1.0 was not fetched: {words}") as error:
        wheel.fetch()
    assert str(error.value).endswith(f"bring {pinned.file} and run `refspec oracle fetch --wheel FILE`")
    assert "\n" not in str(error.value)
    assert statuses() == ["absent"]
    assert left_behind(cache) == []


def test_another_wheel_under_the_same_name(pinned: Wheel, file: Path, pip: Pip, cache: Path) -> None:
    other = made_up_wheel(file, {**FILES, KERNEL: "A = 2\n"})
    pip(bring(file))
    with pytest.raises(WheelError, match="is not the wheel that is pinned, and is not used") as error:
        wheel.fetch()
    assert other.sha256 in str(error.value)
    assert pinned.sha256 in str(error.value)
    with pytest.raises(WheelError, match="is not one of the wheels that are needed") as error:
        wheel.take([file])
    assert other.sha256 in str(error.value)
    assert pinned.sha256 in str(error.value)
    assert left_behind(cache) == []


def test_what_is_no_file(pinned: Wheel, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            wheel.take([path])


def test_half_a_wheel(pinned: Wheel, file: Path, pip: Pip, cache: Path) -> None:
    file.write_bytes(file.read_bytes()[: pinned.size // 2])
    pip(bring(file))
    with pytest.raises(WheelError, match="is not the wheel that is pinned"):
        wheel.fetch()
    assert left_behind(cache) == []


def test_a_bad_wheel_leaves_what_was_there(pinned: Wheel, file: Path, pip: Pip, cache: Path) -> None:
    wheel.take([file])
    (cache / "1.0" / KERNEL).write_text("A = 3\n")
    made_up_wheel(file, {KERNEL: "A = 2\n"})
    pip(bring(file))
    with pytest.raises(WheelError):
        wheel.fetch()
    assert (cache / "1.0" / KERNEL).read_text() == "A = 3\n"


@pytest.mark.parametrize("name", ["sglang/kernels/ops/../../../../../evil.py", "sglang/kernels/ops/a\\..\\evil.py"])
def test_a_file_that_would_land_elsewhere(
    name: str, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wheel, "WHEELS", {"1.0": made_up_wheel(file, {**FILES, name: "evil"})})
    with pytest.raises(WheelError, match="would land elsewhere"):
        wheel.take([file])
    assert list(tmp_path.rglob("*evil*")) == []
    assert left_behind(cache) == []


def test_a_full_disk(pinned: Wheel, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WheelError, match="no space is left where"):
        wheel.take([file])
    assert left_behind(cache) == []


# --- damage -----------------------------------------------------------------------------------------------------------


def change(folder: Path) -> str:
    (folder / KERNEL).write_text("A = 2\n")
    return f"{KERNEL} is not what the wheel holds"


def remove(folder: Path) -> str:
    (folder / KERNEL).unlink()
    return f"{KERNEL}: No such file or directory"


def a_fifo(folder: Path) -> str:
    (folder / KERNEL).unlink()
    os.mkfifo(folder / KERNEL)
    return f"{KERNEL}: not a regular file"


def a_link(folder: Path) -> str:
    aside = (folder / KERNEL).rename(folder / "aside")
    (folder / KERNEL).symlink_to(aside)
    return f"{KERNEL}: not a regular file"


def a_fifo_for_a_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    return "it has no manifest.json that can be read"


def without_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "it has no manifest.json that can be read"


def half_a_manifest(folder: Path) -> str:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    return "it has no manifest.json that can be read"


def another_wheel(folder: Path) -> str:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"wheel": "', '"wheel": "f'))
    return "it comes from another wheel, or from another version of refspec"


def other_parts(folder: Path) -> str:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sglang/kernels/ops/", "sglang/kernels/", 1))
    return "it comes from another wheel, or from another version of refspec"


def a_file_in_its_place(folder: Path) -> str:
    folder.rename(folder.with_name("aside"))
    folder.write_text("not a folder")
    return "it has no manifest.json that can be read"


def a_link_to_nowhere(folder: Path) -> str:
    folder.rename(folder.with_name("aside"))
    folder.symlink_to("nowhere")
    return "it has no manifest.json that can be read"


@pytest.mark.parametrize(
    "damage",
    [
        change,
        remove,
        a_fifo,
        a_link,
        a_fifo_for_a_manifest,
        without_manifest,
        half_a_manifest,
        another_wheel,
        other_parts,
        a_file_in_its_place,
        a_link_to_nowhere,
    ],
)
def test_damage_is_seen_and_mended(damage: Callable[[Path], str], pinned: Wheel, file: Path, cache: Path) -> None:
    wheel.take([file])
    detail = damage(cache / "1.0")
    (state,) = wheel.states()
    assert (state.status, state.detail, state.remedy) == ("damaged", detail, "refspec oracle fetch")
    assert wheel.folders() == {}
    assert [state.status for state in wheel.take([file])] == ["ready"]
    assert (cache / "1.0" / KERNEL).read_text() == FILES[KERNEL]
    assert not [name for name in left_behind(cache) if name.startswith(".")]


# --- interrupted, and two at a time -----------------------------------------------------------------------------------


def fetch_without_end(pip: Pip, mark: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The real command, with the real pins, and a pip that never ends: both processes, once pip is at work."""
    pip(f"""
import time
open(to + '/half.whl', 'w').write('half')
open({str(mark)!r} + '.new', 'w').write(str(os.getpid()))
os.rename({str(mark)!r} + '.new', {str(mark)!r})
time.sleep(600)
""")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(refspec.__file__).parents[1])])
    fetch = subprocess.Popen(
        [sys.executable, "-m", "refspec", "oracle", "fetch"],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return fetch, psutil.Process(int(mark.read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_half(number: signal.Signals, pip: Pip, cache: Path, tmp_path: Path) -> None:
    fetch, _ = fetch_without_end(pip, tmp_path / "pip is running")
    fetch.send_signal(number)
    _, said = fetch.communicate(timeout=60)
    assert fetch.returncode == 128 + number
    assert said == ("refspec: interrupted\n" if number == signal.SIGINT else "")
    assert left_behind(cache) == []


def test_of_a_killed_fetch_pip_ends_and_the_next_fetch_clears_up(
    pinned: Wheel, file: Path, pip: Pip, cache: Path, tmp_path: Path
) -> None:
    fetch, its_pip = fetch_without_end(pip, tmp_path / "pip is running")
    wheel.take([file])
    assert len(left_behind(cache)) == 2  # it is at work
    fetch.kill()
    fetch.communicate()
    its_pip.wait(timeout=30)
    assert len(left_behind(cache)) == 2
    pip("sys.exit('asked in vain')")
    wheel.fetch()
    assert left_behind(cache) == ["1.0"]


def test_what_was_left_on_another_machine_is_removed_a_day_later(pinned: Wheel, file: Path, cache: Path) -> None:
    for name, age in ((".fetch-1-other-a", 2 * 24 * 3600), (".fetch-99999999-other-b", 60), (".fetch-old", 60)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    wheel.take([file])
    assert left_behind(cache) == [".fetch-99999999-other-b", ".fetch-old", "1.0"]


def test_two_at_a_time(pinned: Wheel, file: Path, cache: Path) -> None:
    errors: list[BaseException] = []
    together = threading.Barrier(6)

    def take() -> None:
        try:
            together.wait()
            wheel.take([file])
        except BaseException as error:
            errors.append(error)

    for _ in range(10):
        (cache / "1.0").mkdir(parents=True, exist_ok=True)
        (cache / "1.0" / "manifest.json").write_text("damaged")
        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert statuses() == ["ready"]
        assert left_behind(cache) == ["1.0"]
