"""The command line of a bench and its rows, as a table or JSON, checked against their limits."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.paths import folders
from edge.plan.choices import LoadChoice, choices_path


def bench_parser(about: str | None, *, reports: bool = True) -> argparse.ArgumentParser:
    """Return a parser; `about` is the docstring of the module. `reports`: with --json, for a bench of rows."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if reports:
        made.add_argument("--json", action="store_true")
    return made


def engine_parser(about: str | None, threads: int | None = None, *, reports: bool = False) -> argparse.ArgumentParser:
    """Return a parser of a bench that starts an engine on one model."""
    made = bench_parser(about, reports=reports)
    made.add_argument("model", type=Path)
    made.add_argument("--profile", default="cpu")
    made.add_argument("--threads", type=int, default=threads)
    made.add_argument("--engine", metavar="ID|PATH")
    made.add_argument("--load-mode", metavar="MODE", default="auto")
    made.add_argument("--measured", type=Path, metavar="FILE", help="load_modes.json of `edgellm bench load --apply`")
    return made


def state_of(options: argparse.Namespace) -> Path:
    """Return a new state folder, with what `edgellm bench load --apply` kept if the options name it."""
    state = Path(tempfile.mkdtemp(prefix="e-"))
    if options.measured is not None:
        kept = choices_path(folders(os.environ, state), LoadChoice)
        kept.parent.mkdir(parents=True)
        shutil.copyfile(options.measured, kept)
    return state


def command_at(plan: dict[str, Any], *, cold: bool) -> dict[str, Any]:
    """Return a rung of `plan --json` with the command of a start with or without the page cache."""
    return plan | {"argv": plan["cold"]["argv"]} if cold and plan.get("cold") else plan


def up_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `edgellm up` for the options of `engine_parser`."""
    arguments = ["-p", options.profile, "-m", f"demo={options.model}"]
    arguments += ["--engine", options.engine] if options.engine else []
    arguments += ["--set", f"load_mode={options.load_mode}"] if options.load_mode != "auto" else []
    return arguments + (["--set", f"n_threads={options.threads}"] if options.threads else [])


@dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def kept(self) -> bool:
        return self.limit is None or self.value <= self.limit


def report(rows: Sequence[Row], *, as_json: bool) -> int:
    """Return the exit code: 1 if a limit is exceeded."""
    if as_json:
        print(json.dumps({"schema": 1, "rows": [vars(row) for row in rows]}, ensure_ascii=False))
    else:
        for row in rows:
            limit = "" if row.limit is None else f"  (≤ {row.limit:g}{'' if row.kept else ': EXCEEDED'})"
            print(f"{row.what:<68} {row.value:9.2f} {row.unit:<4}{limit}")
    return 0 if all(row.kept for row in rows) else 1
