"""Deadlines are on the monotonic clock: a suspend stands still on it, a corrected wall clock does not move it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import edge.supervisor

MODULES = sorted(Path(edge.supervisor.__file__).parent.glob("*.py"))
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("time", "gmtime"), ("time", "localtime")}


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_no_module_of_the_supervisor_asks_for_the_time_of_day(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    asked = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert not asked & WALL
