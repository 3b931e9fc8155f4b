"""Puts an engine into engines/<id>/ as a build would, with a stand-in server and without a proof.

Another `tokens` makes another file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edge.engine.output import parse_help
from tests.fakes.toolchain.server import ERAS, write_server


def put(engines: Path, engine_id: str, *, arch: tuple[int, ...] = (), tokens: int = 16, **changes: Any) -> Path:
    folder = engines / engine_id
    server = write_server(folder / "bin/llama-server", cuda=bool(arch), tokens=tokens)
    document: dict[str, Any] = {
        "schema": 1,
        "id": engine_id,
        "kind": "llama-server",
        "fingerprint": f"fingerprint-{engine_id}",
        "source": {"type": "pypi", "name": "llama-cpp-python", "version": "0.5.0-dev", "commit": "0c1e57098"},
        "recipe": {"name": "cuda" if arch else "cpu", "sha256": "0" * 64},
        "options": {},
        "toolchain": {"cmake": "3.25.1", "cc": "12.2.0", "nvcc": None},
        "target": {"machine": None, "glibc": "2.36", "cuda_arch": list(arch), "no_vmm": True if arch else None},
        "files": {
            "bin/llama-server": {
                "sha256": hashlib.sha256(server.read_bytes()).hexdigest(),
                "bytes": server.stat().st_size,
            }
        },
        "flags": {
            name: {"arity": flag.arity, "spelling": flag.spelling, "values": list(flag.values)}
            for name, flag in parse_help(ERAS["load-mode"]).items()
        },
        "progress_protocol": True,
        "library_path": None,
        "proof": {"devices": [], "smoke_tokens_s": 1.0, "gpu": None, "at": "2026-11-01T00:00:00+00:00"},
        "previous": None,
    }
    document.update(changes)
    (folder / "engine.json").write_text(json.dumps(document))
    return folder
