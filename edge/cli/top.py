"""`edgellm top`: temperatures, power, load and tokens of a running edgellm, live."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edge.cli.options import Json, StateDir, client_of, print_json
from edge.cli.output import SafeConsole, console
from edge.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from edge.cli.client import Client

# The default of telemetry.interval_s: a faster screen would draw the same samples again.
REFRESH_S = 1.0
# Columns of a serial console, and of the screen that goes into a pipe.
_NARROWEST = 80


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm top")(top)


def top(
    state_dir: StateDir = None,
    once: Annotated[bool, typer.Option("--once", help="print one screen, as into a pipe, and exit")] = False,
    as_json: Json = False,
) -> None:
    """Watch temperatures, power, load and tokens of a running edgellm until q or Ctrl-C."""
    client = client_of(state_dir)
    if as_json:
        print_json(client.telemetry())
    elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print(client)
    else:
        _watch(client)


def _print(client: Client) -> None:
    past, telemetry = Past(), client.telemetry()
    past.add(telemetry)
    for line in plain(screen(client.status(), telemetry, past, _NARROWEST), _NARROWEST):
        typer.echo(line.rstrip())


def _watch(client: Client) -> None:
    """Draw each frame over the last one in the alternate screen: nothing is cleared, so nothing flickers."""
    past = Past()
    with _keys() as pressed, Live(console=console(), screen=True, auto_refresh=False, transient=True) as live:
        while True:
            telemetry = client.telemetry()
            past.add(telemetry)
            width, height = live.console.size
            live.update(screen(client.status(), telemetry, past, width, height), refresh=True)
            if pressed(REFRESH_S) == "q":
                return


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits for a key without echo; the terminal is restored afterwards.

    The function raises OSError when the terminal went away.
    """
    import select
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)  # not raw: Ctrl-C stays a signal

    def pressed(within_s: float) -> str | None:
        ready, _, _ = select.select([stdin], [], [], within_s)
        key = os.read(stdin, 1) if ready else None
        if key == b"":
            # A hung-up terminal reads as ended at once, each time, and rich draws on no terminal: a busy loop.
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return key.decode(errors="replace") if key else None

    try:
        yield pressed
    finally:
        # EIO once the terminal is gone (its window closed, ssh ended); termios.error is no OSError.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


# The screen: 80 × 24 holds everything, a wider terminal gets longer bars.

# Samples of the curves: the widest terminal, four minutes at one a second.
HISTORY = 240
_BARS = " ▁▂▃▄▅▆▇█"
_MAX_ROWS = 8  # temperatures and rails, shown side by side
_OTHER_LINES = 16  # all lines but those rows and the models
_LEVEL_STYLE = {
    "UNKNOWN": "dim",
    "NOMINAL": "green",
    "PASSIVE": "yellow",
    "HOT": "red",
    "CRITICAL": "bold white on red",
}


class Past:
    """Samples since the screen opened, for the two curves."""

    def __init__(self) -> None:
        self.power_w: deque[float | None] = deque(maxlen=HISTORY)
        self.temp_c: deque[float | None] = deque(maxlen=HISTORY)

    def add(self, telemetry: Mapping[str, Any]) -> None:
        power = telemetry.get("power")
        self.power_w.append(power["power_w"] if power else None)
        self.temp_c.append(telemetry.get("temp_c"))


def screen(
    status: Mapping[str, Any], telemetry: Mapping[str, Any], past: Past, width: int, height: int = 24
) -> RenderableType:
    """Return the screen of the documents /status and /telemetry. Rows that do not fit are left out."""
    rows = max(2, min(_MAX_ROWS, height - _OTHER_LINES - len(status["models"])))
    return Group(
        _head(status, telemetry, width),
        _models(status, telemetry),
        Text(""),
        _pair(_temperatures(telemetry, rows), _rails(telemetry, rows), width),
        Text(""),
        *_loads(telemetry, width),
        *_curves(past, width),
        *_remarks(telemetry, width),
    )


def _head(status: Mapping[str, Any], telemetry: Mapping[str, Any], width: int) -> Text:
    url = ", ".join(f"{url}/v1" for url in status["urls"])
    line = Text.assemble(
        ("edgellm", "bold"), f" {status['version']}  up {format_seconds(status['uptime_s'])}  {url}", no_wrap=True
    )
    age = telemetry.get("age_s")
    line.append(f"\n{telemetry['source']}" + ("" if age is None else f" {age:.1f} s ago"))
    mode = telemetry.get("power_mode")
    if mode:
        locked = ", clocks locked" if telemetry.get("jetson_clocks") else ""
        line.append(f"  mode {mode['name']} ({mode['id']}){locked}")
    governor = telemetry.get("governor")
    if governor:
        line.append("  thermal ")
        line.append(governor["level"], _LEVEL_STYLE.get(governor["level"], ""))
        line.append(f": {governor['because']}")
    line.truncate(2 * width)
    return line


def _models(status: Mapping[str, Any], telemetry: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("model", ratio=3, no_wrap=True)
    table.add_column("state", ratio=2, no_wrap=True)
    for name in ("open", "tokens/s", "tokens/J", "energy"):
        table.add_column(name, justify="right", ratio=2, no_wrap=True)
    used = telemetry.get("energy", {}).get("models", {})
    for model, state in status["models"].items():
        use = used.get(model, {})
        # The rate is of all models together: beside several it would be shown as that of each.
        rate = telemetry.get("tokens_per_s") if len(status["models"]) == 1 else None
        word, progress = state["state"], state.get("progress")
        if word == "LOADING" and progress is not None:
            word += f" {progress:.0%}"
        table.add_row(
            model,
            Text(word, "green" if state["state"] == "READY" else "yellow"),
            str(use.get("open", 0)),
            _number(rate, 1),
            _number(use.get("tokens_per_joule"), 2),
            _joules(use.get("joules")),
        )
    return table


def _pair(left: Table, right: Table, width: int) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(width=width // 2)
    grid.add_column()
    grid.add_row(left, right)
    return grid


def _temperatures(telemetry: Mapping[str, Any], rows: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("temperature", no_wrap=True, min_width=11)
    for name in ("°C", "passive", "critical"):
        table.add_column(name, justify="right", no_wrap=True)
    known = [zone for zone in telemetry.get("temperatures", ()) if zone["temp_c"] is not None]
    for zone in sorted(known, key=lambda zone: -zone["temp_c"])[:rows]:
        text = Text(f"{zone['temp_c']:.1f}", _heat_style(zone))
        table.add_row(zone["name"][:14], text, _number(zone["passive_c"], 0), _number(zone["critical_c"], 1))
    if not known:
        table.add_row("no sensor", "", "", "")
    return table


def _heat_style(zone: Mapping[str, Any]) -> str:
    if zone["passive_c"] is None:
        return ""
    left = zone["passive_c"] - zone["temp_c"]
    # 10 and 4 K before the trip point: the governor's margins for warning and acting by default.
    return "red" if left <= 4 else "yellow" if left <= 10 else ""


def _rails(telemetry: Mapping[str, Any], rows: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("power", no_wrap=True, min_width=14)
    table.add_column("W", justify="right", no_wrap=True)
    power = telemetry.get("power")
    if power is None:
        table.add_row("not measured", "")
        return table
    table.add_row(Text(power["rail"], "bold"), Text(f"{power['power_w']:.2f}", "bold"))
    idle = telemetry.get("energy", {}).get("idle_w")
    if idle is not None:
        table.add_row("when idle", f"{idle:.2f}")
    gpus = [{"name": g["name"], "power_w": g["power_w"]} for g in telemetry.get("gpus", ()) if g["power_w"] is not None]
    parts = [row for row in [*telemetry.get("rails", ()), *gpus] if row["name"] != power["rail"]]
    for row in parts[: rows - 2]:
        table.add_row(row["name"][:24], f"{row['power_w']:.2f}")
    return table


def _loads(telemetry: Mapping[str, Any], width: int) -> list[Text]:
    lines = []
    for gpu in telemetry.get("gpus", ())[:2]:
        clock = f"{gpu['clock_hz'] / 1e6:.0f} MHz" if gpu["clock_hz"] is not None else ""
        lines.append(_bar("GPU", gpu["load_ratio"], clock, width))
    fan, emc = telemetry.get("fan"), telemetry.get("emc", {})
    beside = [f"EMC {emc['load_ratio']:.0%}"] if emc.get("load_ratio") is not None else []
    if fan and fan["speed_ratio"] is not None:
        beside.append(f"fan {fan['speed_ratio']:.0%}" + (f" {fan['rpm']} rpm" if fan["rpm"] is not None else ""))
    lines.append(_bar("CPU", telemetry.get("cpu_load_ratio"), ", ".join(beside), width))
    memory = telemetry.get("memory")
    if memory:
        total, used = memory["total_bytes"], memory["total_bytes"] - memory["available_bytes"]
        swap = f", swap {format_bytes(memory['swap_used_bytes'])}" if memory["swap_used_bytes"] else ""
        lines.append(_bar("memory", used / total, f"{format_bytes(used)} of {format_bytes(total)}{swap}", width))
    return lines


def _bar(name: str, ratio: float | None, beside: str, width: int) -> Text:
    if ratio is None:
        return Text(f"{name:<7}   –  {beside}", no_wrap=True)
    room = max(10, width // 2 - 15)
    full = round(min(1.0, max(0.0, ratio)) * room)
    style = "red" if ratio > 0.95 else "cyan"
    return Text.assemble(f"{name:<7}{ratio:>4.0%}  ", ("█" * full, style), ("░" * (room - full), "dim"), f"  {beside}")


def _curves(past: Past, width: int) -> list[Text]:
    room = width - 24
    rows = (("power", past.power_w, "W"), ("heat", past.temp_c, "°C"))
    return [
        _curve(name, list(values)[-room:], unit) for name, values, unit in rows if any(v is not None for v in values)
    ]


def _curve(name: str, values: list[float | None], unit: str) -> Text:
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    span = max(high - low, 0.02 * abs(high), 1e-9)
    drawn = "".join(" " if v is None else _BARS[1 + min(7, int((v - low) / span * 8))] for v in values)
    return Text(f"{name:<7}{drawn}  {low:.0f}–{high:.0f} {unit}", no_wrap=True)


def _remarks(telemetry: Mapping[str, Any], width: int) -> list[Text]:
    lines: list[str] = []
    if telemetry.get("throttled"):
        lines.append("throttled by the board: " + ", ".join(telemetry["throttled"]))
    events = {line: count for line, count in telemetry.get("overcurrent", {}).items() if count}
    if events:
        lines.append("over-current events: " + ", ".join(f"{line} {count}" for line, count in events.items()))
    for name, source in telemetry.get("sources", {}).items():
        if source["state"] not in ("ok", "silent") and source["because"]:
            lines.append(f"{name}: {source['because']}" + (f" → {source['hint']}" if source["hint"] else ""))
    lines += telemetry.get("notes", ())
    return [Text(line[:width], "yellow", no_wrap=True, overflow="ellipsis") for line in lines[:4]]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _joules(value: float | None) -> str:
    if value is None:
        return "–"
    for unit, factor in (("MJ", 1e6), ("kJ", 1e3)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} J"


def plain(renderable: RenderableType, width: int) -> Iterable[str]:
    """Render without colours, for a pipe."""
    out = SafeConsole(width=width, markup=False, no_color=True, force_terminal=False)
    with out.capture() as capture:
        out.print(renderable)
    return capture.get().splitlines()
