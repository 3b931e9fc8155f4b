"""Measure a running edgellm as its clients see it: first token, tokens per second, gaps, energy, drift over a soak."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct, field, to_builtins

from edge.engine.inspect import Identity, identity
from edge.linux.files import parse_foreign_json

SILENCE_S = 600.0  # a long prompt on a slow board
# Ordinary text: random bytes would take several tokens a word and make prompts longer than asked for.
WORDS = "The quick brown fox jumps over the lazy dog. "


class TimedAnswer(Struct):
    """One streamed completion. `at_s`: since the bench began. `gaps_s`: between tokens after the first."""

    at_s: float
    ttft_s: float
    gaps_s: list[float]
    tokens: int
    prompt_tokens: int
    prompt_tokens_s: float | None  # by the engine's own timings
    tokens_s: float | None


class LoadLevel(Struct):
    """The answers at one number of parallel clients. `watts`: mean power of the board, None where unknown."""

    clients: int
    took_s: float
    answers: list[TimedAnswer] = field(default_factory=list)
    watts: float | None = None

    def summary(self) -> dict[str, Any]:
        tokens = sum(answer.tokens for answer in self.answers)
        gaps = sorted(gap for answer in self.answers for gap in answer.gaps_s)
        joules = None if self.watts is None else self.watts * self.took_s
        return {
            "clients": self.clients,
            "requests": len(self.answers),
            "ttft_s": _quantiles([answer.ttft_s for answer in self.answers]),
            "gap_s": _quantiles(gaps),
            "tokens_s": round(tokens / self.took_s, 2),
            "tokens_s_each": _median([answer.tokens_s for answer in self.answers]),
            "prompt_tokens_s": _median([answer.prompt_tokens_s for answer in self.answers]),
            "watts": None if self.watts is None else round(self.watts, 2),
            "tokens_per_joule": round(tokens / joules, 3) if joules else None,
            "drift": _drift(self.answers),
        }


class ServeBench:
    """One measurement of one model. `watts` returns the board's power now, or None."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None,
        watts: Callable[[], float | None],
        *,
        prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        self._http = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": SILENCE_S,
        }
        self._model = model
        self._watts = watts
        # About 10 tokens a sentence in most vocabularies; the engine counts the real ones.
        self._text = WORDS * max(1, prompt_tokens // 10)
        self._max_tokens = max_tokens
        self._asked = 0
        self._began_s = time.monotonic()

    async def level(self, clients: int, seconds: float) -> LoadLevel:
        """Keep `clients` requests in flight for `seconds`, at least two rounds of them. Raises httpx.HTTPError."""
        began_s, powers = time.monotonic(), [self._watts()]
        found = LoadLevel(clients, 0.0)
        async with httpx.AsyncClient(**self._http) as session:  # type: ignore[arg-type]

            async def client() -> None:
                rounds = 0
                while rounds < 2 or time.monotonic() - began_s < seconds:
                    found.answers.append(await self._ask(session))
                    powers.append(await asyncio.to_thread(self._watts))
                    rounds += 1

            await asyncio.gather(*(client() for _ in range(clients)))
        found.took_s = time.monotonic() - began_s
        known = [power for power in powers if power is not None]
        found.watts = statistics.fmean(known) if known else None
        return found

    async def _ask(self, session: httpx.AsyncClient) -> TimedAnswer:
        self._asked += 1
        body = {
            "model": self._model,
            # Another beginning each time: a cached prefix would make the first token look sooner.
            "messages": [{"role": "user", "content": f"{self._asked}. {self._text} Go on."}],
            "max_tokens": self._max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Answers of one length: their speeds can be compared.
            "ignore_eos": True,
        }
        began_s = time.monotonic()
        times: list[float] = []
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        async with session.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = read_event(line.removeprefix("data: "))
                if chunk["text"]:
                    times.append(time.monotonic())
                usage, timings = chunk["usage"] or usage, chunk["timings"] or timings
        first_s = times[0] if times else time.monotonic()
        return TimedAnswer(
            began_s - self._began_s,
            first_s - began_s,
            [later - earlier for earlier, later in pairwise(times)],
            int(usage.get("completion_tokens") or len(times)),
            int(usage.get("prompt_tokens") or 0),
            timings.get("prompt_per_second"),
            timings.get("predicted_per_second"),
        )


def read_event(text: str) -> dict[str, Any]:
    """Return whether an event has text, and its figures. What is no figure is left out."""
    try:
        chunk = parse_foreign_json(text)
    except ValueError:
        chunk = None
    chunk = chunk if isinstance(chunk, dict) else {}
    rows = chunk.get("choices")
    delta = rows[0].get("delta") if isinstance(rows, list) and rows and isinstance(rows[0], dict) else None
    said = isinstance(delta, dict) and bool(delta.get("content") or delta.get("reasoning_content"))
    return {"text": said, "usage": _figures(chunk.get("usage")), "timings": _figures(chunk.get("timings"))}


def _figures(table: object) -> dict[str, float]:
    found = table.items() if isinstance(table, dict) else ()
    return {key: value for key, value in found if isinstance(value, (int, float)) and 0 <= value < 1e12}


def document(model: str, about: dict[str, Any], levels: Sequence[LoadLevel]) -> dict[str, Any]:
    """Return the results: a summary a level, and every answer."""
    return {
        "schema": 1,
        "model": model,
        **about,
        "levels": [level.summary() for level in levels],
        "answers": [{"clients": level.clients, **to_builtins(each)} for level in levels for each in level.answers],
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    picks = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    # The nearest rank, never a value between two: with few answers an interpolated p95 was not measured.
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for name, share in picks.items()}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def _drift(answers: Sequence[TimedAnswer]) -> float | None:
    """Return the speed of the last quarter over that of the first: below 1 the board throttles. None for under 8."""
    speeds = [answer.tokens_s for answer in sorted(answers, key=lambda each: each.at_s) if answer.tokens_s]
    quarter = len(speeds) // 4
    if quarter < 2:
        return None
    return round(statistics.median(speeds[-quarter:]) / statistics.median(speeds[:quarter]), 3)


# --- llama.cpp's own benchmark, beside it ----------------------------------------------------------------------------

# Options of the engine that llama-bench has, too, and that change its figures.
_SHARED = {
    "-m": ("--model", "-m"),
    "-t": ("--threads", "-t"),
    "-ngl": ("--n-gpu-layers", "--gpu-layers", "-ngl"),
    "-ctk": ("--cache-type-k", "-ctk"),
    "-ctv": ("--cache-type-v", "-ctv"),
    "-fa": ("--flash-attn", "-fa"),
}
LLAMA_BENCH_S = 600.0


def llama_bench_command(cmdline: Sequence[str], *, prompt_tokens: int, max_tokens: int) -> list[str] | None:
    """Return the command line of the llama-bench beside a running llama-server, with the options that both have.

    None for an engine of another name, the embedded one, or where no llama-bench was built.
    """
    program = next((Path(word) for word in cmdline[:4] if Path(word).name == "llama-server"), None)
    if program is None or not os.access(program.with_name("llama-bench"), os.X_OK):
        return None
    # Three repetitions: llama-bench's default of five takes two thirds longer for the same median.
    command = [str(program.with_name("llama-bench")), "-o", "json", "-r", "3"]
    for short, names in _SHARED.items():
        at = next((number for number, word in enumerate(cmdline[:-1]) if word in names), None)
        if at is not None:
            command += [short, cmdline[at + 1]]
    return [*command, "-p", str(prompt_tokens), "-n", str(max_tokens)]


def runs_as(pid: int, program: Path) -> Identity:
    """Return the user of llama-bench. As root: that of the engine, for the server that names its process may be any.

    Raises OSError or ValueError for a process that is gone.
    """
    if os.geteuid() != 0:
        return Identity()
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    words = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    user, group = int(words["Uid"][1]), int(words["Gid"][1])  # the effective ones
    return Identity(user, group, [int(each) for each in words["Groups"]]) if user else identity(program)


def llama_bench(command: Sequence[str], pid: int) -> dict[str, Any]:
    """Run it and return its tokens/s, or `note` with why there are none. It loads the model a second time.

    `pid`: the engine's.
    """
    try:
        user, group, groups = runs_as(pid, Path(command[0]))
        done = subprocess.run(
            command,
            cwd="/",  # the engine's: llama.cpp loads libggml-*.so from the current folder, which may be /tmp
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LLAMA_BENCH_S,
            check=False,
            user=user,
            group=group,
            extra_groups=groups,
        )
        rows = json.loads(done.stdout) if done.returncode == 0 else None
        if rows is None:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"note": f"llama-bench ended with {done.returncode}: {last[:200]}"}
        speeds = {"prompt_tokens_s" if row["n_prompt"] else "tokens_s": round(row["avg_ts"], 2) for row in rows}
    except (OSError, ValueError, LookupError, TypeError, RecursionError, subprocess.TimeoutExpired) as error:
        return {"note": f"llama-bench: {type(error).__name__}: {error}"[:200]}
    return speeds


# --- one page, without anything from elsewhere -----------------------------------------------------------------------

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>edgellm bench: {title}</title>
<style>body{{font:15px system-ui;margin:2em auto;max-width:60em;color:#222}}table{{border-collapse:collapse}}
td,th{{padding:.3em .8em;text-align:right;border-bottom:1px solid #ddd}}svg{{background:#fafafa;margin:1em 0}}</style>
<h1>{title}</h1><p>{about}</p><table><tr>{head}</tr>{rows}</table>{plots}</html>
"""
_COLUMNS = {
    "clients": "clients",
    "requests": "requests",
    "ttft": "first token, median (s)",
    "gap": "between tokens, median (ms)",
    "tokens_s": "tokens/s, all",
    "tokens_s_each": "tokens/s, each",
    "prompt_tokens_s": "prompt tokens/s",
    "watts": "W",
    "tokens_per_joule": "tokens/J",
    "drift": "drift",
}


def page(results: dict[str, Any]) -> str:
    """Return a self-contained HTML page: a table, the speed by clients, and each answer's speed over time."""
    from html import escape

    def cell(level: dict[str, Any], name: str) -> str:
        value = level.get(name)
        if name == "ttft":
            value = level["ttft_s"] and level["ttft_s"]["p50"]
        elif name == "gap":
            value = level["gap_s"] and round(level["gap_s"]["p50"] * 1000, 1)
        return "" if value is None else escape(str(value))

    rows = "".join(
        "<tr>" + "".join(f"<td>{cell(level, name)}</td>" for name in _COLUMNS) + "</tr>" for level in results["levels"]
    )
    by_clients = [(level["clients"], level["tokens_s"]) for level in results["levels"]]
    over_time = [(each["at_s"], each["tokens_s"]) for each in results["answers"] if each["tokens_s"]]
    plots = _plot("tokens/s of all clients, by clients", by_clients) + _plot("tokens/s of each answer, by s", over_time)
    about = ", ".join(f"{name} {value}" for name, value in results.items() if isinstance(value, str | float | int))
    head = "".join(f"<th>{escape(title)}</th>" for title in _COLUMNS.values())
    return _PAGE.format(title=escape(results["model"]), about=escape(about), head=head, rows=rows, plots=plots)


def _plot(title: str, points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return ""
    wide, high = max(x for x, _ in points) or 1, max(y for _, y in points) or 1
    dots = "".join(
        f'<circle cx="{40 + 640 * x / wide:.1f}" cy="{190 - 160 * y / high:.1f}" r="3" fill="#276"/>' for x, y in points
    )
    labels = f'<text x="4" y="34">{high:.0f}</text><text x="4" y="194">0</text><text x="640" y="214">{wide:.0f}</text>'
    return f'<h2>{title}</h2><svg width="720" height="220" role="img" aria-label="{title}">{labels}{dots}</svg>'
