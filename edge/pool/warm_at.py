"""When the start of a model begins that is to be warm at a time of day. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import Struct

# A start that is planned for 08:00 begins this much earlier than its last load took.
_WARM_LEAD = 1.2
_WARM_LEAD_S = 5.0
_WARM_LOOK_S = 30.0  # the wall clock may jump (NTP after a boot without a battery), so that it is read often


class PoolModel(Struct, frozen=True):
    """What the configuration states of one model. `load_s`: its last load, None without a record.

    `return_to`: the model that comes back when this one sleeps and nothing waits, if there is room.
    """

    priority: int = 0
    pin: bool = False
    warm_at: str = ""
    load_s: float | None = None
    return_to: str = ""


def warm_from(now: datetime, model: PoolModel) -> datetime | None:
    """Return when the next start has to begin for the model to be warm at `warm_at`; None if that is unset.

    A board that is switched on after `warm_at` waits for the first request, or for the next day.
    """
    if not model.warm_at:
        return None
    hour, minute = (int(part) for part in model.warm_at.split(":"))
    due = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if now >= due:
        due += timedelta(days=1)
    return due - _lead(model)


def warm_now(
    now: datetime, models: Mapping[str, PoolModel], begun: set[tuple[str, datetime]]
) -> tuple[list[str], float]:
    """Return the models whose start for `warm_at` begins now, and the seconds until the next look.

    `begun` holds each start that began, by the time it is for, and is added to: a clock that is set back repeats none.
    """
    names, pause_s = [], _WARM_LOOK_S
    for name, model in models.items():
        begin = warm_from(now, model)
        if begin is None:
            continue
        start = (name, begin + _lead(model))
        if begin > now:
            pause_s = min(pause_s, (begin - now).total_seconds())
        elif start not in begun:
            begun.add(start)
            names.append(name)
    return names, pause_s


def _lead(model: PoolModel) -> timedelta:
    return timedelta(seconds=(model.load_s or 60.0) * _WARM_LEAD + _WARM_LEAD_S)
