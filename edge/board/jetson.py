"""Identify a Jetson by its device tree: by `compatible`, for `model` is text that makers of carrier boards change."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge.board.table import Row, Soc, table
from edge.board.tree import Tree

_PART = re.compile(r"p\d{4}-\d{4}")
_BASE = ("/sys/firmware/devicetree/base", "/proc/device-tree")


@dataclass(frozen=True, slots=True)
class Jetson:
    """A Jetson. `row` is None for a module that is not in the table: only its chip is known."""

    soc: Soc
    row: Row | None
    super_image: bool  # a device tree with the Super clocks (JetPack 6.2)
    model: str | None
    notes: tuple[str, ...] = ()


def read(tree: Tree, memory_kb: int) -> Jetson | None:
    """Identify the board; None when the device tree is absent or not a Jetson's."""
    compatible = _strings(tree, "compatible")
    if not any(entry.startswith("nvidia,tegra") for entry in compatible):
        return None
    known = table()
    soc = next((known.socs[s] for c in compatible if (s := c.removeprefix("nvidia,")) in known.socs), None)
    if soc is None:
        return None
    row, notes = match(compatible, soc, known.rows, memory_kb)
    is_super = any(entry.endswith("-super") for entry in compatible)
    return Jetson(soc, row, is_super, next(iter(_strings(tree, "model")), None), notes)


def match(compatible: list[str], soc: Soc, rows: tuple[Row, ...], memory_kb: int) -> tuple[Row | None, tuple[str, ...]]:
    """Find the table row by p-number; if several or none match, by MemTotal, with a note."""
    # In "p3768-0000+p3767-0005" the module comes last; the first is the carrier.
    parts = {found[-1] for entry in compatible if (found := _PART.findall(entry))}
    hits = [row for row in rows if parts & set(row.part)]
    if len({row.id for row in hits}) == 1:
        return hits[0], ()
    near = _by_memory(hits or [row for row in rows if row.soc == soc.key], memory_kb)
    if near is None:
        return None, (f"module {', '.join(sorted(parts)) or 'unnamed'} is not in our table: only its chip is known",)
    why = "several modules in one device tree" if hits else f"module {', '.join(sorted(parts)) or 'unnamed'} is unknown"
    return near, (f"{why}: taken as {near.name} because of its memory size",)


def _by_memory(rows: list[Row], memory_kb: int) -> Row | None:
    """Return the nearest row whose memory is within a quarter of this board's."""
    near = min(rows, key=lambda row: abs(row.memory_kb - memory_kb), default=None)
    return near if near is not None and abs(near.memory_kb - memory_kb) <= near.memory_kb / 4 else None


def bandwidth_bytes_s(row: Row, super_image: bool, memory_clock_cap_hz: int | None) -> float:
    """Return the memory bandwidth under nvpmodel's cap of the memory clock; LPDDR moves two bits a cycle and line."""
    most = (row.super_bandwidth_gb_s if super_image else None) or row.bandwidth_gb_s
    if memory_clock_cap_hz and row.bus_bits:
        return min(most * 1e9, 2.0 * memory_clock_cap_hz * row.bus_bits / 8)
    return most * 1e9


def _strings(tree: Tree, name: str) -> list[str]:
    for base in _BASE:
        text = tree.text(f"{base}/{name}")
        if text:
            return [part for part in text.split("\0") if part.strip()]
    return []
