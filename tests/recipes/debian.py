"""Programs out of Debian's packages, unpacked into the test cache: no root, nothing of the machine changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from tests.kept import kept
from tests.needs import lacks

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def program(cache: Path, name: str, package: str) -> list[str]:
    """Return the command of a program: from its package, with the libraries that are missing here.

    Skips the test where that fails; under CI it fails.
    """
    folder = cache / "debian" / package
    try:
        kept(folder, lambda _: _fetch(package, folder))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-300:]
        lacks(f"no {package} from Debian: {error} {detail}")
    found = [path for place in ("usr/sbin", "usr/bin") if (path := folder / "root" / place / name).is_file()]
    if not found:
        lacks(f"{package} has no {name}")
    libraries = sorted({str(path.parent) for path in folder.glob("root/usr/lib/**/*.so*")})
    return [*(["env", f"LD_LIBRARY_PATH={':'.join(libraries)}"] if libraries else []), str(found[0])]


def _fetch(package: str, folder: Path) -> None:
    """Unpack the package, and the libraries it needs that are not installed."""
    (folder / "deb").mkdir(parents=True)
    apt = _apt(folder / "apt")
    _run([*apt, "update", "-qq"], folder)
    planned = _run([*apt, "install", "--print-uris", "-qq", "--no-install-recommends", package], folder)
    names = {unquote(each).partition("_")[0] for each in re.findall(r"^'\S+' (\S+\.deb) ", planned, re.MULTILINE)}
    wanted = {package} | {each for each in names if each.startswith("lib") and not each.startswith("libjs-")}
    _run([*apt, "download", "-qq", *sorted(wanted)], folder / "deb")
    for archive in sorted((folder / "deb").glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(folder / "root")], folder)
    for part in ("apt", "deb"):
        shutil.rmtree(folder / part)


def _apt(folder: Path) -> list[str]:
    """Return apt-get with lists of its own: the machine's may be missing or old, and only root can renew them."""
    for part in ("lists/partial", "archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    options = {"Dir::State::lists": folder / "lists", "Dir::Cache": folder}
    options |= {"Debug::NoLocking": 1, "APT::Sandbox::User": "root"}
    return ["apt-get", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def installed_on_ubuntu(folder: Path, suite: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the packages, by version, that an empty Ubuntu would install for these. Skips the test without its lists.

    Raises CalledProcessError if one of them does not exist there.
    """
    source = folder / f"{suite}.list"
    source.parent.mkdir(parents=True, exist_ok=True)
    # Unsigned: only names and versions are read, and Debian has no key of Ubuntu.
    source.write_text(f"deb [trusted=yes arch=amd64] http://archive.ubuntu.com/ubuntu {suite} main universe\n")
    options = {"Dir::Etc::SourceList": source, "Dir::Etc::SourceParts": "/dev/null", "Dir::State::status": "/dev/null"}
    options |= {"APT::Architecture": "amd64", "APT::Architectures": "amd64", "APT::Get::List-Cleanup": "0"}
    apt = [*_apt(folder / suite), *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    update = [*apt, "--error-on=any", "update", "-qq"]
    try:
        try:
            _run(update, folder)
        except subprocess.CalledProcessError:
            # apt-get does not replace a list that a power cut has emptied while its Release file is the newest.
            shutil.rmtree(folder / suite)
            _apt(folder / suite)
            _run(update, folder)
    except subprocess.CalledProcessError as error:
        lacks(f"no lists of Ubuntu {suite}: {(error.stderr or b'').decode(errors='replace')[-300:]}")
    shown = _run([*apt, "install", "--simulate", "--no-install-recommends", *packages], folder)
    return dict(re.findall(r"^Inst (\S+) \((\S+)", shown, re.MULTILINE))


def _run(command: Sequence[str], cwd: Path) -> str:
    environment = {**os.environ, "PATH": SYSTEM_PATH, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    return subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True).stdout.decode()
