"""State of a partial download: `x.json` beside `x.part`, so that a later process can resume it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edge.linux.files import write_json


@dataclass(frozen=True, slots=True)
class Remote:
    """One file to fetch. `path` is where it goes, relative to the model's folder; `shown` is free of secrets."""

    url: str
    path: str
    shown: str
    bytes: int | None = None
    sha256: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """The remote file as the server described it. None: not sent."""

    etag: str | None = None  # strong ones only
    modified: str | None = None
    total: int | None = None
    sha256: str | None = None
    boot: str | None = None  # of the machine that wrote the bytes

    @property
    def validator(self) -> str | None:
        return self.etag or self.modified

    @property
    def may_resume(self) -> bool:
        """Return whether a part may be continued. A hash would reveal any mixture. Without one the server must give a
        validator and the boot must be the same: after a power cut a file may hold zeros in place of data."""
        return bool(self.sha256) or (bool(self.validator) and self.boot == boot_id())


def load(part: Path, remote: Remote) -> Known:
    """Read the state of a part; delete a part that has none, or one of another file than `remote`."""
    fresh = Known(sha256=remote.sha256, total=remote.bytes)
    try:
        saved = Known(**json.loads(part.with_suffix(".json").read_bytes()))
        foreign = (remote.sha256 is not None and saved.sha256 != remote.sha256) or (
            remote.bytes is not None and saved.total not in (None, remote.bytes)
        )
    except (OSError, ValueError, TypeError):
        foreign = True
    if foreign:
        part.unlink(missing_ok=True)
        return fresh
    return saved


def save(part: Path, known: Known) -> None:
    write_json(part.with_suffix(".json"), asdict(known))


def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
