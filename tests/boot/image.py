"""Root folders of small Debian systems with a real systemd, cached; and the wheels of edgellm for their Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.conftest import CACHE
from tests.kept import kept

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,iproute2,procps,passwd,libgomp1,sudo,make,curl"
BACKEND = ("hatchling", "editables")  # what an editable installation is built with
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
PLATFORMS = ("manylinux_2_17", "manylinux2014", "manylinux_2_28", "manylinux_2_34")
TOOLS = {"systemd-nspawn": "systemd-container", "mmdebstrap": "mmdebstrap", "nsenter": "util-linux"}


@dataclass(frozen=True)
class Suite:
    """`python` runs the product; None: too old for it, the units run with a stub."""

    name: str
    systemd: int
    python: str | None
    unified: bool = True  # the cgroup hierarchy that it is booted with


SUITES = {
    "bookworm": Suite("bookworm", 252, "3.11"),
    "trixie": Suite("trixie", 257, "3.13"),
    "bullseye": Suite("bullseye", 247, None, unified=False),
}


def why_not() -> str | None:
    """Why no system can be booted here; None when it can (tools are installed where that is possible)."""
    if os.geteuid() != 0:
        return "systemd-nspawn needs root"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing and shutil.which("apt-get") is None:
        return f"{', '.join(missing)} not installed, and this is no Debian"
    if missing:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=quiet, check=False)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{', '.join(missing)} could not be installed: {done.stderr.strip()[-300:]}"
    return None


def mirror() -> str:
    """The mirror that this machine itself uses."""
    for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if path.is_file() and (
            found := re.search(r"^(?:URIs:|deb(?: \[.*\])?)\s+(\S+)", path.read_text(), re.MULTILINE)
        ):
            return found[1]
    return "http://deb.debian.org/debian"


def rootfs(suite: Suite) -> Path:
    """The base system of a suite; built once (about a minute)."""
    key = sha256(f"{PACKAGES} {LEFT_OUT}".encode()).hexdigest()[:8]
    base = CACHE / "boot" / f"{suite.name}-{key}"

    def make(_: Path) -> None:
        options = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
        source = f"deb {mirror()} {suite.name} main"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", *options]
        subprocess.run([*command, suite.name, str(base), source], check=True)

    return kept(base, make)


def wheel() -> Path:
    """edgellm as it stands in this checkout."""
    folder = Path(tempfile.mkdtemp(prefix="edgellm-wheel-"))
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def wheels(python: str, ours: Path, *, machine: str = "x86_64") -> Path:
    """A folder with edgellm[embedded] and all its dependencies for another Python; dependencies are cached.

    And with what `pip install -e` of a checkout needs.
    """
    requirements = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    key = sha256(f"{requirements} {BACKEND}".encode()).hexdigest()[:8]
    wanted = CACHE / "boot" / f"wheels-{python}-{machine}-{key}"

    def make(_: Path) -> None:
        where = [f"--platform={platform}_{machine}" for platform in PLATFORMS]
        only = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
        pip = [sys.executable, "-m", "pip", "download", "-q", *only, *where, "--platform=any", "-d", str(wanted)]
        subprocess.run([*pip, f"{ours}[embedded]", *BACKEND], check=True)
        for copy in wanted.glob("edgellm-*.whl"):
            copy.unlink()

    kept(wanted, make)
    folder = Path(tempfile.mkdtemp(prefix="edgellm-wheels-"))
    for each in [*wanted.glob("*.whl"), ours]:
        shutil.copy2(each, folder)
    return folder
