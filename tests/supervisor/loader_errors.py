"""Extract from a source tree of llama.cpp every error that its loader prints.

`python -m tests.supervisor.loader_errors SOURCE` writes loader_errors.json beside this file; SOURCE is a tree of the
pinned commit, as `edgellm build` unpacks it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

KNOWN = Path(__file__).with_name("loader_errors.json")
FILES = (
    "src/llama-model-loader.cpp",
    "src/llama-model.cpp",
    "src/llama-vocab.cpp",
    "src/llama.cpp",
    "src/llama-mmap.cpp",
    "ggml/src/gguf.cpp",
)
_LITERAL = r'"(?:[^"\\]|\\.)*"'
_MESSAGE = rf"((?:{_LITERAL}(?:\s*PRI\w+)?\s*)+)"
_THROWN = re.compile(r"throw std::runtime_error\(\s*(?:format\(\s*)?" + _MESSAGE)
_LOGGED = re.compile(r"(?:LLAMA|GGML)_LOG_ERROR\(\s*" + _MESSAGE)
_PLACE = re.compile(r"%[-+0-9.*]*(?:ll|l|z|h)?[a-zA-Z]?")


def extract(source: Path) -> dict[str, list[str]]:
    """Return the lines as an engine prints them, by file, with a word or a 7 for each value."""
    found: dict[str, list[str]] = {}
    for name in FILES:
        text = (source / name).read_text()
        own = "check_tensor_dims"
        thrown = {f"llama_model_load: error loading model: {_line(each[1], own)}" for each in _THROWN.finditer(text)}
        logged = {_line(each[1], "gguf_init_from_reader") for each in _LOGGED.finditer(text)}
        found[name] = sorted(thrown | logged)
    return found


def _line(literals: str, function: str) -> str:
    """Join the literals of a format and fill it; PRIu64 and the like are the end of a `%`."""
    text = "".join(each[1:-1] for each in re.findall(_LITERAL, literals)).replace("\\n", "").replace('\\"', '"')
    text = text.replace("%s: ", f"{function}: ", 1) if text.startswith("%s: ") else text
    return _PLACE.sub(lambda place: "some" if place[0].endswith("s") else "x" if place[0].endswith("c") else "7", text)


if __name__ == "__main__":
    KNOWN.write_text(json.dumps(extract(Path(sys.argv[1])), indent=1) + "\n")
