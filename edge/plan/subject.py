"""One model as the planner sees it: found once, weighed many times. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from edge.model.file import ModelFile
from edge.plan.kv import Memory, memory_of
from edge.plan.weights import Weights, weights


@dataclass(frozen=True, slots=True)
class Subject:
    """`mmproj_bytes` is the projector's file, all of which is loaded."""

    file: ModelFile
    weights: Weights
    memory: Memory
    mmproj_bytes: int = 0


def subject(file: ModelFile, mmproj_bytes: int = 0) -> Subject:
    return Subject(file, weights(file.meta), memory_of(file.meta), mmproj_bytes)
