"""A machine to run the scripts of the history on: bash, git and readlink, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).parents[1]


class Machine:
    """Folders to work in, a HOME without settings, and few tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for tool in ("bash", "git", "readlink"):
            (folder / "bin" / tool).symlink_to(shutil.which(tool) or f"{tool} is not on this machine")
        (folder / "home").mkdir()
        self.env = {"PATH": str(folder / "bin"), "HOME": str(folder / "home"), "GIT_CONFIG_NOSYSTEM": "1"}

    def git(self, *args: str | Path, stdin: bytes = b"", **env: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        done = subprocess.run(
            command, env=self.env | env, cwd=self.folder, input=stdin, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    def clone(self, *options: str) -> Path:
        """A clone of `small`, made the way `options` say."""
        path = self.folder / f"clone{len(list(self.folder.iterdir()))}"
        self.git("clone", "-q", *options, f"file://{self.folder / 'small'}", path)
        return path

    def asking_for(self, *commits: str) -> Path:
        """A copy of eagle-commits.sh that asks for these commits instead of the twelve."""
        copies = self.folder / f"scripts{len(list(self.folder.iterdir()))}"
        shutil.copytree(REPO / "scripts", copies, ignore=shutil.ignore_patterns("*.py"))
        script = copies / "eagle-commits.sh"
        text, count = re.subn(r'(?<=\ncommits=")(\s+[0-9a-f]{40}){12}', " ".join(commits), script.read_text())
        assert count == 1
        script.write_text(text)
        return script

    def run(self, script: Path, *args: str | Path, cwd: Path | None = None, **env: str) -> tuple[int, list[str], str]:
        """Exit status, lines of stdout, stderr; both streams have to be UTF-8."""
        done = subprocess.run(
            [script, *args],
            env=self.env | env,
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        return done.returncode, done.stdout.decode().splitlines(), done.stderr.decode()


def settings(machine: Machine) -> dict[str, str]:
    """In HOME, in the repository and in the environment. The commits get a signature, as log.showSignature asks for."""
    gpg = machine.folder / "gpg"
    gpg.write_text("#!/bin/sh\necho '[GNUPG:] GOODSIG 0 a'\necho a good signature >&2\n")
    gpg.chmod(0o755)
    (machine.folder / "home" / ".gitconfig").write_text(
        f"""
        [color] ui = always
        [log] showSignature = true
              date = relative
              follow = true
              decorate = full
              mailmap = true
        [format] pretty = oneline
        [core] abbrev = 4
               quotePath = true
               pager = false
        [pager] rev-list = true
                ls-tree = true
        [diff] noprefix = true
               renames = copies
               external = false
        [alias] rev-list = !false
                rev-parse = !false
        [i18n] logOutputEncoding = UTF-16
        [gpg] program = {gpg}
        """
    )
    return {
        "GIT_PAGER": "false",
        "PAGER": "false",
        "GIT_NOGLOB_PATHSPECS": "1",
        "GIT_TRACE": str(machine.folder / "trace"),
    }
