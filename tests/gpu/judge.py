"""Waits for edgellm at URL and says whether the GPU really serves: judge.py URL MODEL RESULTS."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def fetch(url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def wait(url: str, model: str, patience_s: float = 300) -> dict[str, Any]:
    deadline = time.monotonic() + patience_s
    health: dict[str, Any] = {}
    while time.monotonic() < deadline:
        try:
            _, health = fetch(f"{url}/healthz")
        except OSError:
            time.sleep(0.2)
            continue
        if health.get("models", {}).get(model, {}).get("state") in ("READY", "FAILED"):
            break
        time.sleep(0.1)
    return health


def main(url: str, model: str, results: str) -> int:
    health = wait(url, model)
    (Path(results) / "healthz.json").write_text(json.dumps(health, indent=2))
    mine = health.get("models", {}).get(model, {})
    faults = []
    if mine.get("state") != "READY":
        faults.append(f"state {mine.get('state')}: {mine.get('failure')}")
    for name, gate in mine.get("gates", {}).items():
        print(f"gate {name:9} {'open' if gate.get('ready') else 'SHUT'} {gate.get('took_s')} {gate.get('evidence')}")
        if not gate.get("ready"):
            faults.append(f"gate {name} is shut")
    if mine.get("degraded"):
        faults.append(f"degraded: {mine['degraded']}")
    question = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    code, answer = fetch(f"{url}/v1/chat/completions", question)
    (Path(results) / "answer.json").write_text(json.dumps(answer, indent=2))
    speed = answer.get("timings", {})
    print(
        f"completion {code}: {speed.get('predicted_per_second')} tok/s, prompt {speed.get('prompt_per_second')} tok/s"
    )
    if code != 200 or not answer.get("usage", {}).get("completion_tokens"):
        faults.append(f"completion answered {code}")
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
