"""Write docs/troubleshooting.md from the failure kinds in the code: `python -m tests.docs.troubleshooting`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import edge
from edge import errors
from edge.resources import data_dir, load_toml

DOCS = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
HEAD = """# Troubleshooting by kind

Every error names a `kind`, one sentence and one next step: on the terminal, in the `error` object of a 503, in
`edgellm status --json` and in the journal (`journalctl -u edgellm EDGELLM_KIND=bad_model`). Kinds do not change between
releases. Start with `edgellm doctor`. This page is generated from the code.

"""
COMMANDS = """## Commands

An error of a command ends it with the exit code of its kind (sysexits.h). `EDGELLM_DEBUG=1` in the environment prints
the traceback of a `bug` too.

| kind | exit code | meaning |
|---|---|---|
"""
ENGINE = """## Engines

The kinds of a model that does not serve. "Again": whether edgellm starts the engine again by itself, with growing
pauses; "smaller" means with the next smaller plan. No: the same start would fail the same way. Starts that fail in one
way end after eight tries (three for a load that hangs), once the remedies below are spent. A model that failed for want
of memory starts again when a process that holds memory ends, another model stops or sleeps, or a look every 30 s finds
128 MiB more than at the failure (twice as much after each such start in vain); `edgellm status` names the holders.
The look is for memory that a process gives back and lives on: the kernel reports memory that becomes short, not that it
is free again.

| kind | again | next step |
|---|---|---|
"""
REMEDIES = """## Remedies

What edgellm changes when a start fails, by kind: each alone, in this order, then all of them. What helps is kept for
the next start and shown in `degraded`; `edgellm restart` tries without. The list is data, build/llama-server.toml.

| kind | tried |
|---|---|
"""
BUILDS = """## Builds

What `edgellm build` recognizes in the log of a build that failed.

| in the log | next step |
|---|---|
"""
_TREE_LINE = re.compile(r"^[^\w\n]*(\w+Error)[ ]+(\d+)[ ]*(.*)$", re.MULTILINE)


def page() -> str:
    """Return the text of the page."""
    commands = "".join(f"| `{kind}` | {code} | {_cell(text)} |\n" for kind, code, text in _commands())
    engine = "".join(f"| `{kind}` | {again} | {_cell(hint)} |\n" for kind, again, hint in _engines())
    table = load_toml(data_dir("build") / "llama.cpp.toml")
    builds = "".join(f"| {_cell(row['sentence'])} | {_cell(row.get('hint', ''))} |\n" for row in table["failures"])
    remedies = "".join(f"| {kind} | {_cell(tried)} |\n" for kind, tried in _remedies())
    return HEAD + COMMANDS + commands + "\n" + ENGINE + engine + "\n" + REMEDIES + remedies + "\n" + BUILDS + builds


def _remedies() -> Iterator[tuple[str, str]]:
    """Yield a kind and what is tried, from the table of causes."""
    table = load_toml(data_dir("build") / "llama-server.toml")
    changes = {row["id"]: f"{row['subject']} {row['got']}" for row in table["remedies"]}
    for kind, listed in table["causes"].items():
        if listed:
            yield "any other crash" if kind == "other" else f"`{kind}`", ", ".join(changes[id] for id in listed)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _commands() -> Iterator[tuple[str, int, str]]:
    """Yield kind, exit code and meaning from the tree in the docstring of edge.errors."""
    for name, code, meaning in _TREE_LINE.findall(errors.__doc__ or ""):
        error = getattr(errors, name)
        assert error.exit_code == int(code), name
        yield error.kind, error.exit_code, meaning.removeprefix("... ") or "the time limit has passed"


def _engines() -> list[tuple[str, str, str]]:
    """Return kind, whether the engine is started again, and the hint: of log signatures, then of the code."""
    rows: dict[tuple[str, str], str] = {}
    for row in load_toml(data_dir("build") / "llama-server.toml")["signatures"]:
        again = "smaller" if row["oom"] else "no" if row["permanent"] else "yes"
        rows.setdefault((row["kind"], row["hint"]), again)
    for kind, hint in _in_code():
        rows.setdefault((kind, hint), "")
    return sorted((kind, again, hint) for (kind, hint), again in rows.items())


def _in_code() -> Iterator[tuple[str, str]]:
    """Yield (kind, hint) of every `Failure(kind, evidence, hint)` whose kind and hint are literals."""
    for path in sorted(Path(edge.__file__).parent.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                continue
            names: dict[str, str] = {}
            for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                        names[node.targets[0].id] = node.value.value
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Failure":
                    kind, hint = (_text(node.args[at], names) if len(node.args) > at else None for at in (0, 2))
                    if kind and hint:
                        yield kind, hint


def _text(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return names.get(node.id) if isinstance(node, ast.Name) else None


if __name__ == "__main__":
    DOCS.write_text(page(), encoding="utf-8")
