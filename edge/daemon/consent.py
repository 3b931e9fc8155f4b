"""Get what a start lacks, with the operator's consent, by running `edgellm build` and `edgellm model pull`.

As processes of their own they show their progress and import what they need; the process of `up` stays small.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge.config import Config
from edge.errors import EdgeError, EngineMissingError, UsageError
from edge.linux.sockets import parse_address
from edge.paths import Folders
from edge.plan.candidates import NOT_DOWNLOADED, DownloadCandidate
from edge.plan.choose import fetch_first
from edge.plan.prepare import Prepared
from edge.resources import module_command

_TOOLS = "Missing build tools (cmake, ninja) are taken from PyPI."


def fetch(absent: dict[str, DownloadCandidate], state_dir: Path | None, *, yes: bool) -> None:
    """Pull the models that the plan chose. Raises ModelMissingError without consent, EdgeError if a pull fails."""
    wanted = ", ".join(offer.sized for offer in absent.values())
    if not (yes or _agrees(f"fetch {wanted}?")):
        raise fetch_first(absent)
    print(f"fetching {wanted}", flush=True)
    for offer in absent.values():
        _run(["model", "pull", offer.source or offer.id], state_dir)


def build(
    missing: EngineMissingError, recipe: str, state_dir: Path | None, rehearse: Callable[[], Prepared], *, yes: bool
) -> None:
    """Build the engine that the plan needs. Raises `missing` without consent, EdgeError if the build fails.

    A build takes up to an hour, so what can fail in seconds comes first: `rehearse` plans as if the engine were there
    (memory, devices, files), and models that are not downloaded are checked at their source.
    """
    if not (yes or _agrees(f"{missing}. Build it now? {_TOOLS} {missing.hint}")):
        raise missing
    # The download is checked before the build: an hour of compiling for a repository without access is lost.
    for model in rehearse().plan.models.values():
        if model.model.fingerprint == NOT_DOWNLOADED:
            _run(["model", "pull", "--check", f"{model.model.name}:{model.model.quant}"], state_dir)
    print(f"{missing}: building it. {_TOOLS} {missing.hint}", flush=True)
    # Consent to the build covers its tools: JetPack 5 has cmake 3.16, and CUDA needs 3.18.
    _run(["build", "-p", recipe, "--fetch-tools"], state_dir)


def for_the_network(config: Config, folders: Folders, options: dict[str, Any]) -> Config:
    """Return the configuration of --lan: all IPv4 addresses. Make a key if there is none, and show it on a terminal.

    `options` gets the address too, so that a reload finds it again. Raises UsageError where no key exists and stdout is
    no terminal: a log is no place for a secret.
    """
    from edge.gateway import keys  # late: hashing is not for every start

    options["listen"] = [f"0.0.0.0:{parse_address(config.listen[0])[1]}"]
    path = Path(config.gateway.keys_file) if config.gateway.keys_file else folders.config / "keys.toml"
    with keys.locked(path):
        if not keys.read(path):
            if options["json"] or not sys.stdout.isatty():
                raise UsageError("--lan needs an API key, and there is none", "edgellm key add NAME")
            secret, today = keys.new_secret(), datetime.now(timezone.utc).date().isoformat()
            keys.write(path, [keys.make("lan", secret, admin=False, created=today, others=())])
            print(f"a key for other machines, shown only now:\n\n  export EDGELLM_API_KEY={secret}\n", flush=True)
    return replace(config, listen=tuple(options["listen"]), origins={**config.origins, "listen": "flag"})


def _agrees(question: str) -> bool:
    """Ask on the terminal; without one the answer is no."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _run(arguments: Sequence[str], state_dir: Path | None) -> None:
    place = ["--state-dir", str(state_dir)] if state_dir else []
    # The same interpreter by path: PATH of a service may hold another edgellm, or none.
    code = subprocess.run([*module_command("edge"), *arguments, *place], check=False).returncode
    if code:
        raise EdgeError(f"`edgellm {' '.join(arguments)}` failed with exit code {code}", "see the message above")
