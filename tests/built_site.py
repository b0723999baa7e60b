"""The site, built once for all tests that look at it, by the command that a reader would use."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "refspec", "site"]
SHARED = "REFSPEC_TESTS_SHARED"  # an environment variable: the folder of all processes that run tests, see conftest.py


@functools.cache
def build() -> dict[str, Any]:
    """What `refspec site build --json` says; its "out" is there until the tests end.

    With several processes that run tests, the first that comes here builds, and the others wait for it. If the build
    fails, each of them builds, and fails.
    """
    folder = Path(os.environ[SHARED])
    said = folder / "site.json"
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            command = [*COMMAND, "build", "--json", "--out", str(folder / "built" / "site")]
            process = subprocess.run(command, env=quiet(), capture_output=True, text=True, timeout=500)
            assert process.returncode == 0, process.stderr
            said.write_text(process.stdout, encoding="utf-8")
    return json.loads(said.read_text(encoding="utf-8"))


def built_site() -> Path:
    """The folder."""
    return Path(build()["out"])


def quiet() -> dict[str, str]:
    """An environment in which an address from outside does not change what is built."""
    return {name: value for name, value in os.environ.items() if name != "SITE_URL"}
