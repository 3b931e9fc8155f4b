"""Two runs of the suite, through the bare server and through the gateway: what differs, and was it expected? Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

# Which slot and batch a request lands in, and how often a download reports, is chance on the bare server, too.
CHANCE = (
    "test_completion.py::test_completion_parallel_slots",
    "test_completion.py::test_completion_unified",
    "test_completion.py::test_completion_prompt_cache",
    "test_completion.py::test_cancel_request",
    "test_lora.py::test_lora_per_request",
    "test_basic.py::test_server_multiple_addresses",
    "test_compat_gcp.py::test_gcp_predict_multiple_instances",
    "test_router.py::test_router_queue_two_waiters",
    "test_router.py::test_router_download_model",
)
_RUN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r'(\\"(?:progress|done|total|rss|vram|t_[a-z_]+|ts|time)\\":)[-0-9.e+]+', r"\1 0"),
        (r"(url=http://127.0.0.1:)\d+", r"\1P"),
        (r"pytest-of-\w+/pytest-\d+", "TMP"),
        (r"<__media_\w+__>", "<__media__>"),
        (r'/[^"\\\s]*/llama-cache/', "/llama-cache/"),
    ]
]


@dataclass(frozen=True, slots=True)
class Reviewed:
    """A difference that is meant. `tests` are the starts of test ids; `count`: how many differ so, exactly."""

    why: str
    tests: tuple[str, ...]
    count: int

    def covers(self, test: str) -> bool:
        return any(test.startswith(start) for start in self.tests)


def reviewed(table: dict[str, Any]) -> list[Reviewed]:
    return [Reviewed(entry["why"], tuple(entry["tests"]), entry["count"]) for entry in table["difference"]]


def outcomes(junit: str) -> dict[str, str]:
    """Test id → pass | fail | skip."""
    found = {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "fail" if kinds & {"failure", "error"} else "skip" if "skipped" in kinds else "pass"
        found[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = outcome
    return found


def trace(text: str) -> dict[str, list[str]]:
    """Test id → its exchanges, each once, without what changes from run to run."""
    found = {}
    for line in text.splitlines():
        entry = json.loads(line)
        found[entry["test"]] = sorted({_plain(row) for row in entry["rows"] if not row["path"].startswith("/health")})
    return found


def _plain(row: dict[str, Any]) -> str:
    text = json.dumps(row, sort_keys=True)
    for pattern, replacement in _RUN:
        text = pattern.sub(replacement, text)
    return text


def different(bare: dict[str, list[str]], ours: dict[str, list[str]]) -> dict[str, str]:
    """Test id → the first exchange that is not the same."""
    found = {}
    for test, rows in bare.items():
        if any(chance in test for chance in CHANCE):
            continue
        other = ours.get(test, [])
        if rows != other:
            one = next((row for row in rows if row not in other), "-")
            two = next((row for row in other if row not in rows), "-")
            found[test] = f"{one[:400]}\n    {two[:400]}"
    return found


def judge(
    bare: dict[str, str], ours: dict[str, str], traces: dict[str, str], known: list[Reviewed]
) -> tuple[list[str], Counter[str]]:
    """Return the differences without a review, and how often each reviewed reason was met."""
    surprises = []
    met: Counter[str] = Counter()
    for test, outcome in bare.items():
        failed = outcome == "pass" and ours.get(test) != "pass"
        if not failed and test not in traces:
            continue
        reason = next((each.why for each in known if each.covers(test)), None)
        if reason is not None:
            met[reason] += 1
        else:
            surprises.append(f"{test}: {'fails' if failed else 'says something else'}\n    {traces.get(test, '')}")
    surprises += [
        f"reviewed for {each.count} tests, met by {met[each.why]}: {each.why}"
        for each in known
        if met[each.why] != each.count
    ]
    return surprises, met
