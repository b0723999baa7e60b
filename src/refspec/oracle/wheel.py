"""SGLang's published wheels: fetched, checked by hash, and unpacked as far as the oracle needs them.

They lie in the cache folder (refspec.cache); in it `sglang/<version>/` holds the unpacked files and a manifest with the
hash of each. Whatever is made is made in a folder beside it, which takes its place as a whole or is removed. So an
interrupted fetch leaves nothing behind (what a killed one leaves, the next removes), and two at a time do each other no
harm.

Nothing of SGLang is installed or imported as a package, and nothing of it is part of refspec.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import platform
import runpy
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import psutil

from refspec import cache

Progress = Callable[[str, int, int], object]  # what is being done, bytes done, bytes in all

MANIFEST = "manifest.json"
LEFT_OVER_SECONDS = 24 * 3600  # until what another machine's fetch left in a shared cache is taken for abandoned
# Settings of pip that hold for the download: where it comes from, and how it is reached. Others, such as a file of
# requirements or a demand for hashes, are about what somebody installs.
PIP_SETTINGS = (
    "PIP_CACHE_DIR",
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_CONFIG_FILE",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_KEYRING_PROVIDER",
    "PIP_NO_CACHE_DIR",
    "PIP_NO_INDEX",
    "PIP_PROXY",
    "PIP_RETRIES",
    "PIP_TIMEOUT",
    "PIP_TRUSTED_HOST",
)


class WheelError(ValueError):
    """A wheel cannot be had, or is not the one that it should be. What was in the cache before is still there."""


@dataclass(frozen=True)
class Wheel:
    """One published wheel. parts: the files taken out of it, as paths or (with a slash at the end) folders."""

    version: str
    file: str
    sha256: str
    size: int
    parts: tuple[str, ...]


@dataclass(frozen=True)
class WheelState:
    """What the cache holds of one wheel. detail: what is wrong with it, if it is damaged."""

    version: str
    status: Literal["absent", "damaged", "ready"]
    folder: Path
    detail: str = ""

    @property
    def remedy(self) -> str | None:
        """What to do about it; None where all is well."""
        return None if self.status == "ready" else "refspec oracle fetch"


WHEELS = {
    wheel.version: wheel
    for wheel in (
        Wheel(
            version="0.5.23",
            file="sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl",
            sha256="00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
            size=39_063_923,
            parts=(
                "sglang/kernels/ops/",
                "sglang/srt/mem_cache/allocation.py",
                "sglang/srt/speculative/",
                "sglang-0.5.23.dist-info/licenses/",
            ),
        ),
        Wheel(  # for operations whose kernel later versions no longer have
            version="0.4.6",
            file="sglang-0.4.6-py3-none-any.whl",
            sha256="7f54dd9fa19b54d39f34a0905c1b6e1b02e7b7d1346bd03d7b6e2c05d002cb68",
            size=1_232_060,
            parts=("sglang/srt/speculative/", "sglang-0.4.6.dist-info/licenses/"),
        ),
    )
}


def cache_folder() -> Path:
    """Where the wheels lie; it need not exist. Raises WheelError where no home folder is known."""
    try:
        return cache.folder()
    except cache.NoHomeError as error:
        raise WheelError(f"{error} for SGLang's wheels") from None


def states() -> list[WheelState]:
    """What the cache holds of each wheel, every file of it looked at."""
    return [_state(wheel) for wheel in WHEELS.values()]


def folders() -> dict[str, Path]:
    """The folder `sglang` of each version that is ready, for `Sources`."""
    return {state.version: state.folder / "sglang" for state in states() if state.status == "ready"}


def fetch(progress: Progress = lambda *_: None) -> list[WheelState]:
    """Download what is not ready yet, by pip and from the package index that it is configured for. Their states then.

    Raises WheelError if a wheel cannot be downloaded or is not the one that is pinned; OSError if the cache cannot be
    written to.
    """
    _remove_left_overs()
    for wheel in WHEELS.values():
        if _state(wheel).status != "ready":
            with _beside(wheel) as folder:
                _unpack(wheel, _download(wheel, folder, progress), folder, progress)
    return states()


def take(files: list[Path], progress: Progress = lambda *_: None) -> list[WheelState]:
    """Unpack wheels that the user has brought, known by their hash. The states of all wheels then.

    Raises WheelError for a file that is none of WHEELS; OSError if one cannot be read.
    """
    _remove_left_overs()
    by_hash = {wheel.sha256: wheel for wheel in WHEELS.values()}
    brought = []
    for file in files:
        _check_regular(file, links=True)
        digest = _hash(file)
        if digest not in by_hash:
            pinned = ", ".join(f"{wheel.file} has {wheel.sha256}" for wheel in WHEELS.values())
            raise WheelError(f"{file} is not one of the wheels that are needed: its SHA-256 is {digest}; {pinned}")
        brought.append((by_hash[digest], file))
    for wheel, file in brought:
        if _state(wheel).status != "ready":
            with _beside(wheel) as folder:
                _unpack(wheel, file, folder, progress)
    return states()


# --- what is in the cache ---------------------------------------------------------------------------------------------


def _state(wheel: Wheel) -> WheelState:
    folder = _place(wheel)
    if not os.path.lexists(folder):
        return WheelState(wheel.version, "absent", folder)
    detail = _damage(wheel, folder)
    return WheelState(wheel.version, "damaged" if detail else "ready", folder, detail)


def _place(wheel: Wheel) -> Path:
    return cache_folder() / "sglang" / wheel.version


def _damage(wheel: Wheel, folder: Path) -> str:
    """What is wrong with the unpacked wheel; "" if nothing is."""
    try:
        _check_regular(folder / MANIFEST, links=False)
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        source, parts, files = manifest["wheel"], manifest["parts"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"it has no {MANIFEST} that can be read"
    if source != wheel.sha256 or parts != list(wheel.parts):
        return "it comes from another wheel, or from another version of refspec"
    for name, digest in files.items():
        try:
            _check_regular(folder / name, links=False)
            if _hash(folder / name) != digest:
                return f"{name} is not what the wheel holds"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def _check_regular(file: Path, links: bool) -> None:
    """Raises OSError for what is no regular file, nor (if links may be) a link to one: reading it may never end."""
    if not stat.S_ISREG(file.stat(follow_symlinks=links).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- how it gets there ------------------------------------------------------------------------------------------------


@contextmanager
def _beside(wheel: Wheel) -> Iterator[Path]:
    """A folder to work in, on the same disk as the place for the wheel. It is removed whatever happens."""
    place = _place(wheel)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_owned_by(os.getpid()), dir=place.parent))
    except OSError as error:
        raise WheelError(f"cannot write to {place.parent}: {error.strerror} (REFSPEC_CACHE names another)") from None
    try:
        yield folder
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WheelError(_no_space()) from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _owned_by(pid: int) -> str:
    """How the names of the folders begin in which this process works."""
    return f".fetch-{pid}-{platform.node()}-"


def _remove_left_overs() -> None:
    """Remove the folders of fetches that were killed: those whose process is gone, and those of other machines that
    are old.
    """
    for folder in (cache_folder() / "sglang").glob(".fetch-*"):
        pid = folder.name.split("-")[1]
        with contextlib.suppress(OSError):  # its owner may have removed it
            gone = pid.isdecimal() and folder.name.startswith(_owned_by(int(pid))) and not psutil.pid_exists(int(pid))
            if gone or time.time() - folder.stat().st_mtime > LEFT_OVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _no_space() -> str:
    return f"no space is left where {cache_folder()} is; make some, or set REFSPEC_CACHE to a folder elsewhere"


def _download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """The wheel, in `folder`, as pip has brought it; not checked yet."""
    target = folder / "download"
    command = [sys.executable, "-P", "-c", "from refspec.oracle.wheel import run_pip; run_pip()", str(os.getpid())]
    command += ["download", f"sglang=={wheel.version}", "--dest", str(target)]
    # Python and platform are those of the pinned file, not this machine's: it is read, not run.
    command += ["--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    command += ["--platform", "manylinux_2_34_x86_64", "--progress-bar", "off", "--no-input"]
    what = f"downloading SGLang {wheel.version}"
    with (folder / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            command, env=_environment_of_pip(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while pip.poll() is None:
                progress(what, min(_bytes_in(folder), wheel.size), wheel.size)
                time.sleep(0.1)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    found = sorted(target.glob("*.whl"))
    if pip.returncode or not found:
        why = _why_pip_failed(said, pip.returncode)
        raise WheelError(
            f"SGLang {wheel.version} was not fetched: {why}. A wheel from elsewhere will do: bring {wheel.file} and "
            "run `refspec oracle fetch --wheel FILE`"
        )
    return found[0]


def _environment_of_pip(folder: Path) -> dict[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in PIP_SETTINGS
    }
    environment.setdefault("PIP_RETRIES", "2")
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    for name in ("PIP_REQUIRE_HASHES", "PIP_REQUIRE_VIRTUALENV"):  # pip's own configuration may ask for them
        environment[name] = "0"
    # pip downloads into its temporary folder first. In this one, what has come so far is seen, and removed with it.
    environment["TMPDIR"] = str(folder)
    package_folder = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package_folder]))
    return environment


def run_pip() -> None:
    """What the child runs: pip, with the arguments after the first. That one is the process that asked; pip ends with
    it, even if it is killed.
    """
    parent = int(sys.argv.pop(1))

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes files as it goes
            total += file.stat().st_size
    return total


def _why_pip_failed(said: str, status: int) -> str:
    if "No module named pip" in said:
        return "this Python has no pip (`python -m ensurepip` brings it)"
    if os.strerror(errno.ENOSPC) in said:
        return _no_space()
    if "connection broken by" in said:
        return "pip cannot reach its package index"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if errors := [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]:
        return f"pip says: {errors[-1]}"
    return f"pip ended with status {status}" + (f": {lines[-1]}" if lines else "")


def _unpack(wheel: Wheel, file: Path, folder: Path, progress: Progress) -> None:
    """Check the wheel in `file`, unpack what is needed of it in `folder`, and put that into its place."""
    if (digest := _hash(file)) != wheel.sha256:
        raise WheelError(
            f"what came as SGLang {wheel.version} is not the wheel that is pinned, and is not used: its SHA-256 is "
            f"{digest}, not {wheel.sha256}"
        )
    unpacked = folder / "unpacked"
    hashes = {}
    with zipfile.ZipFile(file) as archive:
        entries = [entry for entry in archive.infolist() if _is_needed(wheel, entry)]
        total, done = sum(entry.file_size for entry in entries), 0
        for entry in entries:
            if ".." in PurePosixPath(entry.filename).parts or "\\" in entry.filename:
                raise WheelError(
                    f"{file.name} holds a file that would land elsewhere, and is not used: {entry.filename}"
                )
            content = archive.read(entry)
            target = unpacked / entry.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            hashes[entry.filename] = hashlib.sha256(content).hexdigest()
            done += len(content)
            progress(f"unpacking SGLang {wheel.version}", done, total)
    manifest = {"wheel": wheel.sha256, "parts": wheel.parts, "files": hashes}
    unpacked.mkdir(exist_ok=True)
    (unpacked / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _put_into_place(wheel, unpacked, folder)


def _is_needed(wheel: Wheel, entry: zipfile.ZipInfo) -> bool:
    """Source files and the licence, in the wheel's parts."""
    name = entry.filename
    inside = any(name.startswith(part) if part.endswith("/") else name == part for part in wheel.parts)
    return inside and not entry.is_dir() and name.endswith((".py", "LICENSE"))


def _put_into_place(wheel: Wheel, unpacked: Path, folder: Path) -> None:
    """Move `unpacked` to where the wheel belongs. A whole one that is there by now is as good; any other is moved into
    `folder`, out of the way.
    """
    place = _place(wheel)
    for attempt in itertools.count():
        try:
            unpacked.rename(place)  # onto nothing, or an empty folder: a folder with files in it refuses
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if _state(wheel).status == "ready":
            return
        with contextlib.suppress(FileNotFoundError):  # another fetch may have moved it already
            place.rename(folder / f"replaced-{attempt}")
