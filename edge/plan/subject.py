"""One model as the planner sees it: found once, weighed many times. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from edge.model.file import ModelFile
from edge.plan.kv import Memory, memory_of
from edge.plan.weights import Weights, weights


@dataclass(frozen=True, slots=True)
class Subject:
    file: ModelFile
    weights: Weights
    memory: Memory


def subject(file: ModelFile) -> Subject:
    return Subject(file, weights(file.meta), memory_of(file.meta))
