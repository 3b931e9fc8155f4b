"""A model file with what a plan needs of its header, computed once. Pure."""

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


def candidate_of(file: ModelFile) -> Subject:
    return Subject(file, weights(file.meta), memory_of(file.meta))
