"""Settings that hold for every test."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile

import pytest
import torch
from built_site import SHARED
from hypothesis import settings

# To collect thousands of tests makes millions of objects that stay. A third of its time would go into looking through
# them for garbage; when it is over, they are put where no later collection looks.
gc.disable()

# Triton decides at its first import whether it compiles or interprets, and without a GPU it can only interpret. Nothing
# that is imported above imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every run, so that a failure on one machine is a failure on all of them. To look for new ones:
# HYPOTHESIS_PROFILE=explore
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# A test run in the background or under nohup starts with these ignored, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is printed must not depend on the terminal that the tests are started from, or on the language, the colours, the
# pager and the clone of SGLang that are wished for there.
TERMINAL = ("COLUMNS", "LINES", "COLORTERM", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
for name in [name for name in os.environ if name in (*TERMINAL, "LANGUAGE", "REFSPEC_SGLANG") or name[:3] == "LC_"]:
    del os.environ[name]
os.environ |= {"LANG": "C.UTF-8", "TERM": "xterm", "PAGER": "cat"}

torch.set_num_threads(1)  # the matrices here are so small that a second thread costs more than it brings


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folder for what all processes share that run tests; pytest-xdist starts them later, and they inherit
    its name."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="refspec-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED), ignore_errors=True)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.manual_seed(0)
