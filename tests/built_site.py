"""The site, built once for all tests that look at it, by the command that a reader would use."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "refspec", "site"]


@functools.cache
def build() -> dict[str, Any]:
    """What `refspec site build --json` says; its "out" is there until the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="refspec-site-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [*COMMAND, "build", "--json", "--out", str(folder / "site")]
    process = subprocess.run(command, env=quiet(), capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def built_site() -> Path:
    """The folder."""
    return Path(build()["out"])


def quiet() -> dict[str, str]:
    """An environment in which an address from outside does not change what is built."""
    return {name: value for name, value in os.environ.items() if name != "SITE_URL"}
