"""`refspec doctor` on machines where something is missing or broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, random_head, random_llama, saved_head, saved_target

import refspec
from refspec import doctor
from refspec.models import checkpoint

SOURCE = str(Path(refspec.__file__).parents[1])


def ask(*args: str, fakes: Path | None = None, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run doctor with the modules in the folder `fakes` before all others."""
    path = os.pathsep.join(filter(None, [fakes and str(fakes), SOURCE]))
    return subprocess.run(
        [sys.executable, "-m", "refspec", "doctor", *args],
        env={**os.environ, "PYTHONPATH": path, **changed},
        capture_output=True,
        text=True,
    )


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stderr == ""
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert report["ok"] == all(check["ok"] for check in found.values() if check["required"])
    assert done.returncode == (0 if report["ok"] else 1)
    for check in found.values():
        assert check["needed_for"]
        assert check["ok"] or check["remedy"] or check["name"] == "GPU"
    return found


@pytest.fixture(scope="module")
def shown() -> str:
    """What it says here, on a terminal of the usual width."""
    return ask(COLUMNS="80").stdout


def test_this_machine(shown: str) -> None:
    found = checks(ask("--json"))
    assert torch.__version__ in found["torch"]["found"]
    assert found["torch"]["required"]
    assert found["GPU"]["ok"] == torch.cuda.is_available()
    assert not found["SGLang oracle"]["required"]
    for name, check in found.items():
        assert name in shown
        assert check["ok"] or check["needed_for"] in " ".join(shown.split())


def test_commands_to_begin_with_can_be_copied_from_80_columns(shown: str) -> None:
    assert shown.splitlines()[-2:] == ["  refspec demo", '  refspec generate "def fib(n):"']


BROKEN = {
    "raise ImportError('libtorch.so: cannot open')": "does not load: ImportError: libtorch.so: cannot open",
    "import os; os.kill(os.getpid(), 11)": "Python was ended by SIGSEGV while it was loaded",
    "import os; os._exit(3)": "Python ended with status 3 while it was loaded",
    "print('{not json'); raise SystemExit": "does not load: SystemExit",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_torch(code: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(code)
    found = checks(ask("--json", fakes=tmp_path))
    assert not found["torch"]["ok"]
    assert BROKEN[code] in found["torch"]["found"]
    assert not found["weights tiny"]["ok"]
    assert ask(fakes=tmp_path).stdout.endswith("to be mended first: torch\n")


@pytest.mark.parametrize("pythonpath", [None, ""])
def test_a_learners_files_in_the_current_folder_are_none_of_ours(
    pythonpath: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "numpy", "triton", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a learner wrote this')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "PROBES", dict.fromkeys(("torch", "triton")))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if pythonpath is not None:
        monkeypatch.setenv("PYTHONPATH", pythonpath)
    answers = doctor._ask_child()
    assert answers["torch"]["version"] == torch.__version__
    assert "a learner wrote this" not in str(answers)


def test_no_torch_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(doctor, "PROBES", {"torch": probe})
    answers: list[str] = []
    monkeypatch.setattr("builtins.print", lambda line, **_: answers.append(line))
    doctor.answer()
    assert json.loads(answers[0])["answer"] == {"error": "not installed (no module torch)"}


def test_ascii_and_no_home(tmp_path: Path) -> None:
    shown = ask(PYTHONIOENCODING="ascii", HOME=str(tmp_path / "none"), XDG_CACHE_HOME="")
    assert shown.stdout.isascii()
    assert "Traceback" not in shown.stderr
    assert "\n+  torch" in shown.stdout


def test_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHIPPED_FOLDER", tmp_path)
    target = random_llama(llama_config(vocab_size=256), dtype=torch.float32)
    saved_target(tmp_path / "target", target)
    saved_head(tmp_path / "eagle", random_head(target))

    tiny, eagle, standalone, *_ = doctor._check_weights(doctor._probe_weights(), doctor._probe_algorithms())
    assert (tiny.name, tiny.ok, eagle.ok) == ("weights tiny", True, True)
    assert f"{sum(p.numel() for p in target.parameters()) / 1e6:.2f}M parameters" in tiny.found
    assert not standalone.ok
    assert not standalone.required

    file = tmp_path / "target" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "eagle" / "config.json").write_text("{}")
    tiny, eagle, *_ = doctor._check_weights(doctor._probe_weights(), doctor._probe_algorithms())
    assert not tiny.ok
    assert not eagle.ok
    assert "config.json" in eagle.found
    file.unlink()
    assert not doctor._check_weights(doctor._probe_weights(), doctor._probe_algorithms())[0].ok
    (tmp_path / "target" / "tokenizer.json").unlink()
    assert "no tokenizer.json" in doctor._check_weights(doctor._probe_weights(), doctor._probe_algorithms())[0].found


@pytest.mark.parametrize(("cuda", "words"), [(None, "a torch built for CUDA"), ("13.0", "nvidia-smi")])
def test_a_gpu_that_torch_cannot_use(cuda: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/nvidia-smi")
    check = doctor._check_gpu({"devices": []}, {"cuda": cuda})
    assert not check.ok
    assert words in str(check.remedy)


def test_a_gpu() -> None:
    check = doctor._check_gpu({"devices": ["H200, 139 GB, compute 9.0"]}, {"cuda": "13.0"})
    assert check.ok
    assert "139 GB" in check.found


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = {"version": "3.7.1"}
    without, gpu = {"devices": []}, {"devices": ["H200"]}
    assert doctor._check_triton(found, without).found == "3.7.1; without a GPU its kernels run in the interpreter"
    assert doctor._check_triton(found, gpu).found == "3.7.1; TRITON_INTERPRET=1 has its kernels interpreted"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert doctor._check_triton(found, without).found.endswith("TRITON_INTERPRET=0 forbids the interpreter")
    assert doctor._check_triton(found, gpu).found == "3.7.1; its kernels run on the GPU"
    missing = {"error": "not installed (no module triton)"}
    monkeypatch.setattr("sys.platform", "linux")
    assert doctor._check_triton(missing, without).remedy == "pip install triton"
    monkeypatch.setattr("sys.platform", "darwin")
    assert "Linux only" in doctor._check_triton(missing, without).found


def test_the_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFSPEC_CACHE", str(tmp_path))
    check = doctor._check_oracle()
    assert (check.ok, check.remedy) == (False, "refspec oracle fetch")
    assert check.found == "wheels of SGLang: 0.5.23 absent, 0.4.6 absent"

    (tmp_path / "sglang" / "0.4.6").mkdir(parents=True)
    check = doctor._check_oracle()
    assert check.remedy == "refspec oracle fetch"
    assert "0.4.6 damaged; 0.4.6: it has no manifest.json that can be read" in check.found


def test_the_oracle_of_somebody_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    check = doctor._check_oracle()
    assert "no home folder is known" in check.found
    assert "REFSPEC_CACHE" in str(check.remedy)
