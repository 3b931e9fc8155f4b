"""Write docs/json.md and docs/json.schema.json from the shapes of the documents: `python -m tests.docs.json_page`."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, UnsetType

from tests.docs import command_shapes as commands
from tests.docs import shapes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "json.md"
SCHEMA = DOCS.with_name("json.schema.json")
# Name of the document in tests/docs/documents.py, its sources, its shape.
DOCUMENTS: tuple[tuple[str, str, Any], ...] = (
    ("/healthz", "`GET /healthz`", shapes.Healthz),
    ("/livez", "`GET /livez`", shapes.Livez),
    ("/readyz", "`GET /readyz`", shapes.Readyz),
    ("/readyz/{id}", "`GET /readyz/{id}`", shapes.ReadyModel),
    ("/telemetry", "`GET /telemetry`", shapes.Telemetry),
    ("top", "`edgellm top`", shapes.Top),
    ("status", "`edgellm status`", shapes.Status),
    ("ps", "`edgellm ps`", shapes.Ps),
    ("reload", "`edgellm reload`", shapes.Reload),
    ("timeline", "`edgellm timeline`", commands.Timeline),
    ("starts.jsonl", "starts.jsonl in the state folder, one line a start, the last 50", commands.StartRecord),
    ("crashes.jsonl", "crashes.jsonl in the state folder, one line a crash, the last 50", commands.CrashRecord),
    ("up", "`edgellm up`, one line an event", commands.UpLine),
    ("plan", "`edgellm plan`", commands.PlanDocument),
    ("board", "`edgellm board`", commands.BoardDocument),
    ("doctor", "`edgellm doctor`", commands.Doctor),
    ("chat", "`edgellm chat TEXT`", commands.Answer),
    ("model list", "`edgellm model list`", commands.ModelList),
    ("model show", "`edgellm model show`, `pull`, `import`", commands.ModelDocument),
    ("model check", "`edgellm model check`", commands.ModelCheck),
    ("engine list", "`edgellm engine list`", commands.EngineList),
    ("key add", "`edgellm key add`", commands.NewKey),
    ("key list", "`edgellm key list`", commands.KeyList),
    ("profile list", "`edgellm profile list`", commands.ProfileList),
    ("config show", "`edgellm config show`", commands.ConfigShow),
    ("config check", "`edgellm config check`", commands.ConfigCheck),
)
# Commands with --json whose documents are small or hold another file, in one line each.
OTHERS = {
    "build": "engine and proof; with `--dry-run` the recipe, the steps and what is missing",
    "bench load": "seconds by load mode, cold and warm; `applied`",
    "bench draft": "tokens/s by way of drafting; `winner`, `applied`",
    "bench sleep": "seconds to the first token by way of sleeping; `winner`, `applied`",
    "bench serve": "the figures of its table; `llama_bench`, null where the engine has none beside it",
    "engine show": "engine.json of the engine: source, recipe, toolchain, target, files with SHA-256, flags, proof",
    "engine use": "`current`, `previous`",
    "engine rollback": "`current`, `previous`",
    "engine remove": "`removed`",
    "engine export": "`engine`, `file`, `bytes`",
    "engine import": "`engine`, `new`: whether it was not installed before",
    "model pull": "as `model show`; with `--check` `ref`, `bytes`",
    "model import": "as `model show`",
    "model quantize": "as `model show`, with `mix` (tensors by type) and `fallbacks`",
    "model remove": "`removed`, `paths`, `bytes`",
    "profile show": "the profile: `preset`, `tiers`, `choices`, `origins`; settings as in configuration.md",
    "profile check": "`name`, `ok`, `values`",
    "service install": "the steps, and what differed",
    "service diff": "the units that differ",
    "service uninstall": "the steps",
}
HEAD = """# JSON documents

Written by `python -m tests.docs.json_page`; a test compares each shape with documents of a running edgellm. The same as
JSON Schema: [json.schema.json](json.schema.json).

- `schema` is raised when a field changes its meaning or goes. New fields do not raise it: ignore what you do not know.
- Units are in the names: `_bytes`, `_s` (seconds), `_w` (watts), `_c` (°C), `_hz`, `_ratio` (0…1). `at` and `since` are
  Unix seconds.
- An unknown value is null, never 0 and never −256. "Absent": the key is left out where it does not apply.
- Commands print them with `--json`, on stdout; errors stay sentences on stderr, with the exit code.

"""
_COMMENT = re.compile(r"^    (\w+):[^#\n]*#\s*(.+)$", re.MULTILINE)


def page() -> str:
    """Return the text of the page."""
    known = [shape for _, _, shape in DOCUMENTS]
    parts = [part for part in _parts(known) if part not in known]
    documents = "".join(_document(source, shape) for _, source, shape in DOCUMENTS)
    others = "".join(f"| `edgellm {name}` | {text} |\n" for name, text in OTHERS.items())
    return (
        HEAD
        + "## Documents\n\n"
        + documents
        + "## Parts\n\n"
        + "".join(_table(f"### {part.__name__}", part) for part in parts)
        + "## Other commands\n\n| command | document |\n|---|---|\n"
        + others
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema; each document is one of `$defs`."""
    _, components = msgspec.json.schema_components([shape for _, _, shape in DOCUMENTS], ref_template="#/$defs/{name}")
    for shape in _parts([shape for _, _, shape in DOCUMENTS]):
        del components[shape.__name__]["title"]
        for name, text in _comments(shape).items():
            properties = components[shape.__name__]["properties"]
            if name in properties:
                properties[name] = {**properties[name], "description": text}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": components}


def _document(source: str, shape: Any) -> str:
    members = get_args(shape) or (shape,)
    if len(members) == 1:
        return _table(f"### {shape.__name__}\n\n{source}", shape)
    first, *rest = members
    return _table(f"### {first.__name__}\n\n{source}", first) + "".join(_table(f"### {m.__name__}", m) for m in rest)


def _table(head: str, shape: type[Struct]) -> str:
    comments = _comments(shape)
    text = " ".join((inspect.getdoc(shape) or "").split())
    rows = "".join(
        f"| `{name}` | {_named(hint)} | {comments.get(name, '')} |\n" for name, hint in _hints(shape).items()
    )
    return f"{head}\n\n{text}\n\n| field | type | |\n|---|---|---|\n{rows}\n"


def _hints(shape: type[Struct]) -> dict[str, Any]:
    hints = get_type_hints(shape)
    tag = shape.__struct_config__
    own = {name: hints[name] for name in shape.__struct_fields__}
    return {str(tag.tag_field): f'"{tag.tag}"', **own} if tag.tag is not None else own


def _comments(shape: type[Struct]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in reversed(shape.__mro__):
        if issubclass(each, Struct) and each is not Struct:
            found |= {name: text.replace("|", "\\|") for name, text in _COMMENT.findall(inspect.getsource(each))}
    return found


def _named(hint: Any) -> str:
    """Return a type as JSON has it; a Struct is a link to its table."""
    if isinstance(hint, str):
        return hint
    members, origin = get_args(hint), get_origin(hint)
    if origin in (Union, types.UnionType):
        names = [_named(member) for member in members if member is not UnsetType and member is not type(None)]
        null, absent = type(None) in members, UnsetType in members
        return " or ".join([*names, *(["null"] if null else [])]) + (", or absent" if absent else "")
    if origin in (list, tuple):
        return f"list of {_named(members[0])}"
    if origin is not None:  # dict
        return f"map to {_named(members[1])}"
    if isinstance(hint, type) and issubclass(hint, Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(hint, "any")


def _parts(shapes: list[Any]) -> list[type[Struct]]:
    """Return every Struct in these types, each once, in the order of its first use."""
    found: dict[type[Struct], None] = {}
    for shape in shapes:
        for part in _structs(shape, found):
            found[part] = None
    return list(found)


def _structs(hint: Any, known: dict[type[Struct], None]) -> Iterator[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct) and hint not in known:
        known[hint] = None
        yield hint
        for inner in get_type_hints(hint).values():
            yield from _structs(inner, known)
    for member in get_args(hint):
        yield from _structs(member, known)


if __name__ == "__main__":
    DOCS.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
