"""Extract from a source tree of llama.cpp what each architecture caches, and the largest image of each projector.

`python -m tests.plan.architectures SOURCE` writes architectures.json and projectors.json beside this file; SOURCE is a
tree of the pinned commit, as `edgellm build` unpacks it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).with_name("architectures.json")
PROJECTORS = KNOWN.with_name("projectors.json")


def extract(source: Path) -> dict[str, dict[str, Any]]:
    """Return the rules of every architecture that llama.cpp can load, by its name in a file."""
    names = dict(re.findall(r'\{ LLM_ARCH_(\w+),\s+"([^"]+)"', (source / "src/llama-arch.cpp").read_text()))
    model = (source / "src/llama-model.cpp").read_text()
    loaded = re.findall(r"case LLM_ARCH_(\w+):\s*\n\s*return new llama_model_(\w+)\(params\)", model)
    bodies: dict[str, str] = {}
    for path in (source / "src/models").glob("*.cpp"):
        for found in re.finditer(r"void llama_model_(\w+)::load_arch_hparams\(.*?\n\}\n", path.read_text(), re.DOTALL):
            bodies[found[1]] = found[0]
    return {names[arch]: rules(bodies.get(name, "")) for arch, name in sorted(loaded, key=lambda pair: names[pair[0]])}


def rules(body: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if pattern := re.search(r"load_swa_pattern\(ml, (\d+)(?:, (?:/\*\w+=\*/)?(true|false))?\)", body):
        found["window"] = {"period": int(pattern[1]), "whole_first": pattern[2] == "true"}
    elif "SLIDING_WINDOW_PATTERN" in body:
        found["window"] = "by the file's array"
    if "full_attn_interval" in body:
        interval = re.search(r"full_attn_interval = (\d+)", body)
        found["attends_every"] = int(interval[1]) if interval else None
    elif "is_recr_impl[" in body:
        found["recurrent"] = "where there are no KV heads"
    if "INDEXER_KEY_LENGTH" in body:
        found["indexer"] = True
    return found


def projectors(source: Path) -> dict[str, int | None]:
    """Return the most tokens of an image by projector; None where its header or its image size decides."""
    folder = source / "tools/mtmd"
    names = dict(re.findall(r'\{ PROJECTOR_TYPE_(\w+),\s*"([^"]+)"', (folder / "clip-impl.h").read_text()))
    text = (folder / "clip.cpp").read_text()
    text = text[text.index("// model-specific params") : text.index("unknown vision projector type")]
    found: dict[str, int | None] = {}
    for cases, body in re.findall(r"((?:case PROJECTOR_TYPE_\w+:\s*)+)\{(.*?)\} break;", text, re.DOTALL):
        limits = [int(most) for most in re.findall(r"set_limit_image_tokens\(\d+, (\d+)\)", body)]
        for case in re.findall(r"PROJECTOR_TYPE_(\w+)", cases):
            if case in names:
                found[names[case]] = max(limits) if limits else None
    return dict(sorted(found.items()))


if __name__ == "__main__":
    PROJECTORS.write_text(json.dumps(projectors(Path(sys.argv[1])), indent=1) + "\n")
    KNOWN.write_text(json.dumps(extract(Path(sys.argv[1])), indent=1) + "\n")
