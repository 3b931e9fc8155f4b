"""`edgellm up` over the fake llama-server, configured by a file that the test may change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from edge.cli.client import Client
from edge.engine.output import parse_help
from edge.paths import folders
from tests.fakes import llama_switches
from tests.serving import Up, edgellm, eventually


class Served(Up):
    """`fake` is the fake engine's folder, `config` the file that a reload reads."""

    fake: Path
    config: Path

    def cli(self, *arguments: str, rc: int = 0) -> str:
        done = edgellm(*arguments, "--state-dir", str(self.state))
        assert done.returncode == rc, done.stdout + done.stderr + self.output
        return done.stdout + done.stderr

    def configure(self, *models: str, top: str = "") -> None:
        """`models`: the body of each [[model]]."""
        self.config.write_text(config_text(*models, top=top))

    @cached_property
    def client(self) -> Client:
        """Return a client of the control socket, which costs no process per request."""
        return Client(folders({}, self.state))

    def __exit__(self, *error: object) -> None:
        self.client.close()
        super().__exit__(*error)

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def reload(self) -> dict[str, Any]:
        """Reload. Raises EdgeError if the configuration cannot be planned."""
        return self.client.reload()

    def model(self, name: str = "chat") -> dict[str, Any]:
        found: dict[str, Any] = self.status()["models"][name]
        return found

    def ready(self, name: str = "chat") -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            if not self.healthz():
                return None
            found = self.status()["models"].get(name, {})
            return found if found.get("state") == "READY" else None

        found: dict[str, Any] = eventually(there, lambda: f"{name} is not ready: {self.output}")
        return found

    @property
    def pids(self) -> list[int]:
        return llama_switches.starts(self.fake)


def install(data: Path, engine_id: str, **switches: Any) -> Path:
    """Install an engine in `data`, as a build does, and return the fake's folder."""
    folder = data / "engines" / engine_id
    (folder / "bin").mkdir(parents=True)
    server = llama_switches.write_fake(folder / "bin", **{"kv_mib": 400.0, **switches})
    flags = parse_help(llama_switches.help_text("load-mode"))
    document = {
        "schema": 1,
        "id": engine_id,
        "kind": "llama-server",
        "source": {"version": "0.5.0-fake", "commit": "0a1b2c3d4"},
        "target": {"cuda_arch": [], "no_vmm": None},
        "files": {"bin/llama-server": {"sha256": "", "bytes": server.stat().st_size}},
        "flags": {name: {"arity": flag.arity, "spelling": flag.spelling} for name, flag in flags.items()},
        "proof": {"devices": []},
    }
    (folder / "engine.json").write_text(json.dumps(document))
    return folder / "bin"


def config_text(*models: str, top: str = "") -> str:
    return f'schema = 1\nprofile = "cpu"\n{top}\n' + "".join(f"[[model]]\n{body}\n" for body in models)


@contextmanager
def served(
    folder: Path,
    *models: str,
    top: str = "",
    ready: bool = True,
    program: Sequence[str] = ("-m", "edge", "up"),
    env: dict[str, str] | None = None,
    **switches: Any,
) -> Iterator[Served]:
    """`program`: another way to start it; `env`: more of its environment."""
    state, fake = folder / "s", folder / "fake"
    config = state / "config" / "edgellm.toml"
    config.parent.mkdir(parents=True)
    config.write_text(config_text(*models, top=top))
    fake.mkdir()
    # As large as any plan here asks for: a smaller one would be a difference from the plan.
    binary = llama_switches.write_fake(fake, **{"kv_mib": 400.0, **switches})
    with Served(state, "--engine", str(binary), program=program, env=env) as running:
        running.fake, running.config = fake, config
        if ready:
            running.wait_for("ok", "degraded")
        yield running
