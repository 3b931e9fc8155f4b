"""Parse recipes: cmake cache scripts of build/ with their table in build/llama.cpp.toml. Pure."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from edge.errors import UsageError
from edge.units import parse_size

_ENTRY = re.compile(r'^set\((\w+)\s+("(?:[^"\\]|\\.)*"|\S+)\s+CACHE\s+(\w+)\s+"((?:[^"\\]|\\.)*)"\)', re.MULTILINE)
_INCLUDE = re.compile(r'^include\("\$\{CMAKE_CURRENT_LIST_DIR\}/([\w.-]+)"\)', re.MULTILINE)
# How CMakeLists.txt and *.cmake files declare what may be set.
_DECLARED = re.compile(
    r"(?:option|cmake_dependent_option)\s*\(\s*(\w+)"
    r"|set\s*\(\s*(\w+)\s+[^()]*?CACHE"
    r"|if\s*\(\s*NOT\s+DEFINED\s+(\w+)",
    re.IGNORECASE | re.DOTALL,
)


class BuildOption(Struct, frozen=True):
    """One cache entry. `why` is its help text."""

    name: str
    value: str
    type: str
    why: str


class Recipe(Struct, frozen=True):
    """One kind of build. `sha256` covers its script and what it includes; `arch` is empty if the GPU decides."""

    name: str
    script: str  # path of the .cmake file
    sha256: str
    options: tuple[BuildOption, ...]
    cuda: bool
    arch: tuple[int, ...] = ()
    machine: str | None = None  # "aarch64" where it is for one
    cpu_minutes: int = 11
    disk_bytes: int = 0
    trust: str = ""
    refused: str | None = None

    def option(self, name: str) -> str | None:
        return next((option.value for option in self.options if option.name == name), None)


def parse_script(text: str) -> tuple[BuildOption, ...]:
    """Parse the `set(NAME VALUE CACHE TYPE "why")` lines, the only statements of a recipe besides include."""
    return tuple(BuildOption(m[1], m[2].strip('"'), m[3], m[4]) for m in _ENTRY.finditer(text))


def includes(text: str) -> tuple[str, ...]:
    """Return the files beside a script that it includes, one level deep."""
    return tuple(_INCLUDE.findall(text))


def make_recipe(name: str, script: str, texts: Iterable[str], known: Mapping[str, Any]) -> Recipe:
    """Make a recipe. `texts`: the included files, then the script. `known`: its table, {} for a user's script."""
    all_texts = list(texts)
    options: dict[str, BuildOption] = {}
    for text in all_texts:
        for option in parse_script(text):
            # cmake's first `set(... CACHE ...)` of a name wins, so an included file would beat the script: refuse that.
            if option.name in options:
                raise UsageError(f"{script} sets {option.name} twice", "the first one would win silently; remove one")
            options[option.name] = option
    digest = hashlib.sha256("\0".join(all_texts).encode()).hexdigest()
    cuda = options["GGML_CUDA"].value.upper() in ("ON", "1", "TRUE", "YES") if "GGML_CUDA" in options else False
    return Recipe(
        name=name,
        script=script,
        sha256=digest,
        options=tuple(options.values()),
        cuda=cuda,
        arch=tuple(known.get("arch", ())),
        machine=known.get("machine"),
        cpu_minutes=int(known.get("cpu_minutes", 51 if cuda else 11)),
        disk_bytes=parse_size(known.get("disk", "2GiB")),
        trust=known.get("trust", "your own recipe"),
        refused=known.get("refused"),
    )


def recipe_name(table: Mapping[str, Any], capability: str | None, has_gpu: bool) -> str:
    """Return the recipe for a compute capability, `cuda` for any other NVIDIA GPU, else `cpu`."""
    for name, known in table["recipes"].items():
        if capability in known["capability"]:
            return str(name)
    return "cuda" if has_gpu or capability else "cpu"


def hopeless(table: Mapping[str, Any], capability: str | None) -> tuple[str, str] | None:
    """Return (reason, hint) for GPUs that no pin supports (FC-04)."""
    for entry in table.get("hopeless", ()):
        if capability in entry["capability"]:
            return entry["because"], entry["hint"]
    return None


def declared_options(texts: Iterable[str]) -> frozenset[str]:
    """Return every option that a tree's cmake files declare; cmake ignores unknown GGML_* names silently."""
    names: set[str] = set()
    for text in texts:
        uncommented = re.sub(r"#.*", "", text)
        for match in _DECLARED.finditer(uncommented):
            names.update(name for name in match.groups() if name)
    return frozenset(names)


def unknown_options(recipe: Recipe, declared: frozenset[str]) -> tuple[str, ...]:
    """Return the recipe's options that the tree does not declare, without cmake's own."""
    return tuple(
        option.name
        for option in recipe.options
        if option.name not in declared and not option.name.startswith("CMAKE_") and option.name != "BUILD_SHARED_LIBS"
    )


def dropped(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a file (by its path in the tree) is left out when the archive is unpacked."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def arm_architecture(isa: Iterable[str]) -> str:
    """Turn /proc/cpuinfo's Features into gcc's -march on aarch64, in place of -mcpu=native (FC-07)."""
    have = set(isa)
    extras = []
    if "asimddp" in have:
        extras.append("dotprod")
    if {"fphp", "asimdhp"} <= have:
        extras.append("fp16")
    if "i8mm" in have:
        extras.append("i8mm")
    # dotprod and fp16 are extensions of armv8.2-a: GCC manual, AArch64 options.
    return "+".join(["armv8.2-a", *extras]) if extras else "armv8-a"
