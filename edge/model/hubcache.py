"""The user's Hugging Face cache: its folder, and the repository and revision of a file in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def folder(env: Mapping[str, str]) -> Path | None:
    """Return the cache that other programs fill (`llama-server -hf`, `hf download`). It need not exist."""
    named = named_folder(env)
    base = env.get("XDG_CACHE_HOME") or (f"{env['HOME']}/.cache" if env.get("HOME") else None)
    return named or (Path(base) / "huggingface" / "hub" if base else None)


def named_folder(env: Mapping[str, str]) -> Path | None:
    """Return the cache that a variable names; None where only the default place is left."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if env.get(variable):
            return Path(env[variable]) / below
    return None


def origin(path: Path) -> tuple[str, str] | None:
    """Return source and revision: `models--owner--repo/snapshots/<rev>/a.gguf` -> ("hf://owner/repo/a.gguf", rev)."""
    parts = path.parts
    for at, part in enumerate(parts[:-3]):
        if part.startswith("models--") and parts[at + 1] == "snapshots":
            repo = "/".join(part.split("--", 2)[1:])
            return (f"hf://{repo}/{'/'.join(parts[at + 3 :])}", parts[at + 2]) if "/" in repo else None
    return None
