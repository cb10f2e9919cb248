"""Run a command under the conditions of other machines: in the background, in other folders, as another user.

``python -m tests.support.conditions tests/actors/collective`` runs tests under all of them; ``--only`` chooses some.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONDITIONS = {
    "background": "SIGINT and SIGHUP are ignored, as after nohup, and there is no terminal",
    "below-tmp": "the checkout is a copy below /tmp, in a folder with spaces in its name",
    "long-tmpdir": "TMPDIR has more than 107 characters",
    "read-only-home": "HOME cannot be written to",
    "small-shm": "/dev/shm has 16 MiB",
    "other-user": "the user is nobody, with a HOME of its own",
}
_NEEDS_MOUNTS = {"read-only-home", "small-shm"}
_MOUNTS = {
    "read-only-home": 'mount --bind "$HOME" "$HOME"; mount -o remount,bind,ro "$HOME"',
    "small-shm": "mount -t tmpfs -o size=16m,mode=1777 tmpfs /dev/shm",
}


def lacks(condition: str) -> str:
    """Return why this machine cannot make a condition; an empty text if it can."""
    if condition in _NEEDS_MOUNTS | {"other-user"} and os.geteuid() != 0:
        return "only root can make it"
    if condition in _NEEDS_MOUNTS:
        tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
        return "" if tried.returncode == 0 else f"no mount namespaces: {tried.stderr.strip()}"
    if condition == "other-user":
        tried = subprocess.run([*_AS_NOBODY, sys.executable, "-c", _STARTS], capture_output=True, text=True)
        return "" if tried.returncode == 0 else f"nobody cannot run {sys.executable}"
    return ""


_STARTS = "import sys, subprocess; subprocess.run([sys.executable, '-c', 'import torch, ray'], check=True)"
_AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@contextmanager
def under(
    conditions: Collection[str], command: Sequence[str | Path]
) -> Iterator[tuple[list[str], Path, dict[str, str]]]:
    """Yield the command that runs another one under conditions, the folder to run it in, and its environment."""
    with tempfile.TemporaryDirectory(prefix="raypar conditions ", dir="/tmp") as made:
        folder, home = Path(made), Path(made, "home")
        folder.chmod(0o755)
        home.mkdir()
        env, root = os.environ | {"HOME": str(home), "TMPDIR": "/tmp"}, ROOT
        if "below-tmp" in conditions:
            root = folder / "check out"
            _copy(root)
        if "long-tmpdir" in conditions:
            long = folder / "-".join(["a long name of a temporary folder"] * 4)
            long.mkdir()
            long.chmod(0o777)
            env["TMPDIR"] = str(long)
        env["PYTHONPATH"] = str(root)
        first = ["trap '' INT HUP"] if "background" in conditions else []
        first += [_MOUNTS[name] for name in _MOUNTS if name in conditions]
        outer = ["unshare", "--mount"] if _NEEDS_MOUNTS & set(conditions) else []
        inner = list(map(str, command))
        if "background" in conditions:
            outer = ["setsid", "--wait", *outer]
        if "other-user" in conditions:
            inner = [*_AS_NOBODY, *inner]
            for path in (home, *((root, *root.rglob("*")) if root != ROOT else ())):
                os.chown(path, 65534, 65534, follow_symlinks=False)
        script = "; ".join(["set -e", *first, f"exec {shlex.join(inner)}"])
        yield [*outer, "bash", "-c", script], root, env


def run_under(conditions: Collection[str], command: Sequence[str | Path], timeout: float) -> tuple[int, str]:
    """Run a command under conditions; return its exit status and what it printed."""
    with under(conditions, command) as (words, folder, env):
        done = subprocess.run(
            words,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout


def _copy(root: Path) -> None:
    """Copy the checkout, links as links, without what tools leave behind."""
    left = shutil.ignore_patterns(".venv*", ".git", "build", "dist", "runs", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, root, symlinks=True, ignore=left)


def main(words: Sequence[str] | None = None) -> int:
    """Run tests under conditions, and print what pytest prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONDITIONS, help="conditions; without it, all but other-user")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds")
    asked, tests = parser.parse_known_args(words)
    conditions = asked.only or [name for name in CONDITIONS if name != "other-user"]
    code, said = run_under(conditions, [sys.executable, "-m", "pytest", *tests], asked.timeout)
    sys.stdout.write(said)
    return code


if __name__ == "__main__":
    sys.exit(main())
