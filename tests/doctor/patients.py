"""Facts to judge: a board tree as it was read, with one thing changed at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge.doctor.check import Check
from edge.doctor.doctor import examine, read_facts
from edge.doctor.facts import DoctorFacts
from edge.engine.engine import Engine, Flag
from edge.paths import Folders
from tests.trees.trees import tree

CUDA_ENGINE = Engine(
    id="0c1e57098-orin-1",
    kind="llama-server",
    path="/opt/bin/llama-server",
    version="0.5.0-dev",
    flags={"--cache-ram": Flag("--cache-ram", 1)},
    cuda=True,
    built_for=(87,),
    no_vmm=True,
)


_READ: dict[str, DoctorFacts] = {}  # each tree is read once


def places(base: Path) -> Folders:
    """Return all five folders below `base`."""
    return Folders(base / "data", base / "state", base / "cache", base / "run", base / "config")


def patient(name: str, tmp_path: Path, **changes: Any) -> DoctorFacts:
    """Return the facts of the tree `name`; `live=True`: as if it were the running machine."""
    if name not in _READ:
        _READ[name] = read_facts(tree(name), places(tmp_path), {}, {}, measure=False)
    return replace(_READ[name], **changes)


def with_engine(facts: DoctorFacts, engine: Engine, **changes: Any) -> DoctorFacts:
    return replace(facts, serving=replace(facts.serving, engine=engine, engine_problem=None, **changes))


def finding(facts: DoctorFacts, name: str) -> Check:
    """Return the one check of that name."""
    found = [check for check in examine(facts) if check.name == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def absent(facts: DoctorFacts, name: str) -> bool:
    return all(check.name != name for check in examine(facts))
