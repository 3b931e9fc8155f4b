"""Fetch sources with pip and git, which bring the user's proxies and certificates."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.errors import BadDataError, UnavailableError
from edge.resources import module_command

Say = Callable[[str], None]


def download(pypi: Mapping[str, Any], src_dir: Path, say: Say) -> Path:
    """Download the sdist with pip. Its hash is checked by pip and again by unpack."""
    archive = src_dir / str(pypi["file"])
    if archive.is_file() and archive.stat().st_size == pypi["bytes"]:
        return archive
    src_dir.mkdir(parents=True, exist_ok=True)
    say(f"fetching {pypi['file']} ({int(pypi['bytes']) / 1e6:.0f} MB) from PyPI")
    requirement = src_dir / "requirement.txt"
    requirement.write_text(f"{pypi['name']}=={pypi['version']} --hash=sha256:{pypi['sha256']}\n")
    command = [*pip_command(), "download", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    # The sdist's own build back end is only asked for its metadata; it may come as a wheel.
    command += ["--only-binary", "scikit-build-core,cmake,ninja,packaging,pathspec"]
    command += ["--dest", str(src_dir), "-r", str(requirement)]
    done = _run(command)
    text = done.stdout + done.stderr
    if "DO NOT MATCH THE HASHES" in text:
        raise BadDataError(
            f"{pypi['file']} has another hash than the pinned one", "the index serves another file: do not use it"
        )
    if done.returncode != 0 or not archive.is_file():
        why = f"{pypi['file']} could not be fetched: {_last_line(text, 'pip')}"
        raise UnavailableError(why, "fetch it elsewhere and give --source path:FILE")
    return archive


def pip_command() -> list[str]:
    """Return this Python's pip, else the system's. Raises UnavailableError."""
    own = module_command("pip")
    if _run([*own, "--version"]).returncode == 0:
        return own
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise UnavailableError("no pip is installed", "sudo apt install python3-pip, or give --source path:FILE or git")
    return [found]


def clone(url: str, ref: str, tree: Path, say: Say) -> None:
    """Clone one commit without history. A full commit id is its own hash."""
    say(f"fetching {ref} from {url}")
    # Cloned beside and renamed: an interrupted clone must not look like a tree.
    partial = tree.with_name(f".{tree.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for command in (
            ["git", "init", "--quiet", "."],
            ["git", "fetch", "--quiet", "--depth", "1", url, ref],
            ["git", "checkout", "--quiet", "--detach", "FETCH_HEAD"],
        ):
            _git(command, partial)
        got = head(partial)
        # 40 hex digits are a commit id, which names its content: a mirror cannot answer with another tree.
        if len(ref) == 40 and got != ref:
            raise BadDataError(f"{url} answered {got} for the commit {ref}", "do not use this mirror")
        if not (partial / "tools/server").is_dir():
            raise BadDataError(f"{ref} of {url} has no tools/server", "use a tag of 2025 or newer")
        partial.replace(tree)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _git(command: list[str], folder: Path) -> None:
    try:
        done = _run(command, folder)
    except OSError as error:
        raise UnavailableError("git is not installed", "sudo apt install git, or use --source pypi") from error
    if done.returncode != 0:
        why = f"{' '.join(command[:2])} failed: {_last_line(done.stderr, 'git')}"
        raise UnavailableError(why, "check the tag and the network, or use --source pypi")


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )


def _last_line(text: str, program: str) -> str:
    return (text.strip().splitlines() or [f"{program} printed nothing"])[-1]


def head(tree: Path) -> str | None:
    """Return the commit of a git tree, None without one."""
    if not (tree / ".git").exists():
        return None
    done = _run(["git", "-c", f"safe.directory={tree}", "-C", str(tree), "rev-parse", "HEAD"])
    return done.stdout.strip() if done.returncode == 0 else None


def fetch_tools(tools_dir: Path, requirements: Sequence[str], say: Say) -> None:
    """Install cmake and ninja from their PyPI wheels into our own folder; the system stays as it is."""
    if all((tools_dir / "bin" / name).exists() for name in ("cmake", "ninja")):
        return
    names = ", ".join(line.split()[0] for line in requirements)
    say(f"fetching {names} from PyPI")
    partial = tools_dir.with_name(f".{tools_dir.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        listed = partial / "requirements.txt"
        listed.write_text("".join(" ".join(line.split()) + "\n" for line in requirements))
        command = [*pip_command(), "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        done = _run([*command, "--target", str(partial), "-r", str(listed)])
        if done.returncode != 0:
            why = f"cmake and ninja could not be fetched: {_last_line(done.stderr, 'pip')}"
            raise UnavailableError(why, "sudo apt install cmake ninja-build")
        # The wheels' own commands are Python scripts that look for their package; the programs lie inside.
        (partial / "bin").mkdir(exist_ok=True)
        for name in ("cmake", "ninja"):
            program = partial / name / "data/bin" / name
            if program.is_file():
                link = partial / "bin" / name
                link.unlink(missing_ok=True)
                link.symlink_to(Path("..") / program.relative_to(partial))
        shutil.rmtree(tools_dir, ignore_errors=True)
        partial.replace(tools_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
