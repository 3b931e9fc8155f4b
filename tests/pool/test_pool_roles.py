"""Eviction among models of all roles and of different sizes, on the real engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from edge.units import MIB
from tests.daemon.served import Served, config_text
from tests.plan.random_gguf import Shape, write
from tests.serving import edgellm, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# `chat` is the real SmolLM2; the others have random weights and its vocabulary. `small` and `large` chat too.
SHAPES = {
    "embed": Shape(arch="qwen3", layers=2, embd=256, ff=512, tied=True, pooling=gguf.PoolingType.LAST),
    "rank": Shape(arch="qwen3", layers=2, embd=128, ff=256, tied=True, pooling=gguf.PoolingType.RANK),
    "small": Shape(layers=2, embd=128, heads=2, kv_heads=2, ff=128, ctx=512),
    "large": Shape(layers=4, embd=512, heads=8, kv_heads=8, ff=1024, ctx=512),
}
SET = "set = { n_ctx = 512, n_threads = 1, n_parallel = 1, cache_ram = 0 }"
DOCUMENTS = ["the board is hot", "a cat sleeps"]


@pytest.fixture(scope="module")
def files(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"chat": smollm2, **{name: write(folder / f"{name}.gguf", each, smollm2) for name, each in SHAPES.items()}}


def configure(state: Path, files: dict[str, Path], top: str = "", pinned: str = "") -> None:
    bodies = [
        f'id = "{name}"\nref = "{file}"\npreload = false\n{SET}\n' + ("pin = true\npriority = 1" * (name == pinned))
        for name, file in files.items()
    ]
    (state / "config").mkdir(parents=True, exist_ok=True)
    (state / "config" / "edgellm.toml").write_text(config_text(*bodies, top=top))


def needs_of(state: Path) -> dict[str, int]:
    models = json.loads(edgellm("plan", "--json", "--state-dir", str(state)).stdout)["models"]
    return {
        name: sum(each["required_bytes"] for each in model["ladder"][model["chosen"]]["memory"].values())
        for name, model in models.items()
    }


def post(up: Served, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{up.url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(up: Served, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert post(up, "/v1/chat/completions", body)["usage"]["completion_tokens"] >= 1


def embed(up: Served, name: str) -> None:
    assert len(post(up, "/v1/embeddings", {"model": name, "input": "hot"})["data"][0]["embedding"]) == 256


def rank(up: Served, name: str) -> None:
    body = {"model": name, "query": "heat", "documents": DOCUMENTS}
    assert {each["index"] for each in post(up, "/v1/rerank", body)["results"]} == {0, 1}


USES: dict[str, Callable[[Served, str], None]] = {
    "chat": chat, "embed": embed, "rank": rank, "small": chat, "large": chat
}  # fmt: skip


def test_each_role_gets_its_memory_in_turn_and_a_pinned_one_stays(short_dir: Path, files: dict[str, Path]) -> None:
    """There is room for the pinned reranker and the largest of the others: the smaller ones share it where they can."""
    state = short_dir / "s"
    configure(state, files)
    needs = needs_of(state)
    limit = needs.pop("rank") + max(needs.values()) + MIB
    configure(state, files, f"[memory]\nlimit = {limit}", pinned="rank")
    with Served(state) as up:
        eventually(up.healthz, lambda: up.output)
        rank(up, "rank")
        pid = up.ready("rank")["pid"]
        for name in ("chat", "embed", "large", "rank", "small", "chat", "embed"):
            USES[name](up, name)
            rows = json.loads(up.cli("ps", "--json"))["models"]
            held = {each: sum(row["memory_bytes"].values()) for each, row in rows.items() if row["state"] != "SLEEPING"}
            assert name in held and sum(held.values()) <= limit, held
            assert up.model("rank")["pid"] == pid
        assert {model["failure"] for model in up.status()["models"].values()} == {None}
