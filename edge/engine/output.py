"""Parse llama-server's --help, --version and --list-devices of every era since 2023. Pure."""

from __future__ import annotations

import re

from msgspec import Struct

from edge.engine.engine import Device, Flag

# Forms of common/arg.cpp: names, bullet lists of values, "allowed values:", and choices in brackets.
_NAME = re.compile(r"-{1,2}[A-Za-z](?:[\w-]|\.\w)*")  # --fim-qwen-1.5b-default
_BULLET = re.compile(r"\s+- ([A-Za-z0-9_+]+)(?: \(default\))?: ")
_ALLOWED = re.compile(r"\s+allowed values: (.+)")
_CHOICES = re.compile(r"[\[{<]([\w+-]+(?:[|,][\w+-]+)+)[\]}>]")
_BARE_CHOICES = re.compile(r"[a-z][\w-]*(?:,[a-z][\w-]*)+")  # --spec-type none,draft-simple,ngram-mod
# An option that is still listed and only throws: it counts as absent.
_REMOVED = "the argument has been removed"
_MIB = 1024**2

_VERSION_NEW = re.compile(r"^version: (\S+) \(build (\d+), commit (\w+)\)", re.MULTILINE)
_VERSION_OLD = re.compile(r"^version: (\d+)(?: \((\w+)\))?", re.MULTILINE)
_DEVICE = re.compile(r"^\s+([A-Za-z]+\d+): (.+?)(?: \((\d+) MiB(?:, (\d+) MiB free)?\))?\s*$", re.MULTILINE)
# Builds without git print `unknown` or an empty commit.
_COMMIT = re.compile(r"[0-9a-f]{6,40}")


class Version(Struct, frozen=True):
    """A version. `number`: as printed (1 from a shallow clone), so only `commit` compares."""

    number: str
    commit: str | None


def parse_version(text: str) -> Version | None:
    """Parse `version: 0.5.0-dev (build 0, commit 0c1e57098)`, `version: 8762 (073bb2c20)` or `version: 7770`."""
    new = _VERSION_NEW.search(text)
    if new:
        return Version(new[1], _commit(new[3]))
    old = _VERSION_OLD.search(text)
    return Version(old[1], _commit(old[2])) if old else None


def _commit(text: str | None) -> str | None:
    return text if text and _COMMIT.fullmatch(text) else None


def parse_devices(text: str) -> tuple[Device, ...]:
    """Parse the lines after `Available devices:`, without the CPU."""
    _, found, rest = text.partition("Available devices:")
    if not found:
        return ()
    return tuple(
        Device(match[1], match[2], _mib(match[3]), _mib(match[4]))
        for match in _DEVICE.finditer(rest)
        if match[1] != "CPU"
    )


def _mib(text: str | None) -> int | None:
    return int(text) * _MIB if text else None


def parse_help(text: str) -> dict[str, Flag]:
    """Parse every option by every name, without those that are listed as removed."""
    flags: dict[str, Flag] = {}
    for block in _blocks(text):
        names, hint = _split(block[0])
        if not names or any(_REMOVED in line for line in block):
            continue
        spelling = max(names, key=len)
        flag = Flag(spelling, _arity(hint), _values(hint, block[1:]))
        for name in names:
            # `--kv-offload, -nkvo, --no-kv-offload` are two spellings of two meanings; each keeps its own.
            flags[name] = Flag(_own_spelling(name, names), flag.arity, flag.values)
    return flags


def _blocks(text: str) -> list[list[str]]:
    """Split into one block per option: its first line starts in column 0 to 2, its description further right."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line[:3].lstrip().startswith("-") and not line.startswith("----"):
            blocks.append([line])
        elif blocks and line.startswith("   "):
            blocks[-1].append(line)
    return blocks


def _split(line: str) -> tuple[list[str], str]:
    """Split `-fa,   --flash-attn [on|off|auto]    set …` into names and value hint; old help repeats the hint."""
    names: list[str] = []
    hint = ""
    rest = line.strip()
    while match := _NAME.match(rest):
        names.append(match[0])
        rest = rest[match.end() :]
        word = re.match(r" (?! )(.*?)(?=,\s+-{1,2}[A-Za-z]|\s{2,}|$)", rest)
        if word:
            hint = word[1]
            rest = rest[word.end() :]
        comma = re.match(r",\s+(?=-)", rest)
        if not comma:
            break
        rest = rest[comma.end() :]
    return names, hint


def _arity(hint: str) -> int:
    return len(re.sub(r"<[^>]*>", "X", hint).split())


def _values(hint: str, description: list[str]) -> tuple[str, ...]:
    choices = _CHOICES.search(hint)
    if choices:
        return tuple(re.split(r"[|,]", choices[1]))
    if _BARE_CHOICES.fullmatch(hint):
        return tuple(hint.split(","))
    if not hint:
        return ()
    for line in description:
        allowed = _ALLOWED.match(line)
        if allowed:
            return tuple(value.strip() for value in allowed[1].split(","))
    return tuple(match[1] for line in description if (match := _BULLET.match(line)))


def _own_spelling(name: str, names: list[str]) -> str:
    negative = name.startswith(("--no-", "-n"))
    same = [
        other
        for other in names
        if other.startswith("--no-") == (negative and any(n.startswith("--no-") for n in names))
    ]
    return max(same or names, key=len)
