"""The status page in a real browser. TEST_PICTURES=DIR keeps the screenshots, to be looked at."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge.gateway import keys
from edge.gateway.config import GatewayOptions
from edge.supervisor.status import Degraded, Gate, ModelStatus, State
from tests.browser.chromium import Tab, chromium, installed
from tests.fakes.upstream.engine import Line, Received
from tests.fakes.upstream.model import FakeModel
from tests.fakes.upstream.real import real_engine
from tests.gateway.conftest import Rig, Rigs, rig, sockets
from tests.gateway.raw import until
from tests.gateway.test_gateway_own_routes import Past

__all__ = ["rig", "sockets"]  # fixtures
pytestmark = [pytest.mark.full, pytest.mark.skipif(installed() is None, reason="no chromium: apt-get install chromium")]

# Every text against what is behind it, by WCAG's formula. Returns what is below 4.5 : 1.
CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[0-9.]+/g) || [0, 0, 0, 0]).map(Number);
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const bad = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walk.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push([text.data.trim(), ratio]);
  }
  return bad;
})()
"""


def gates(opened: int) -> dict[str, Gate]:
    names = ["driver", "context", "backend", "weights", "kv_cache", "warm"]
    evidence = [
        "1 device",
        "Orin, compute capability 8.7",
        "29 of 29 layers on the GPU",
        "4.6 GiB read",
        "512 MiB",
        "one token",
    ]
    took = [0.004, 0.41, 0.02, 6.2, 0.3, 0.9]
    found: dict[str, Gate] = {}
    since = 1000.0
    for number, name in enumerate(names):
        since += took[number]
        if number < opened:
            found[name] = Gate(True, since, took[number], evidence[number])
        else:
            found[name] = Gate(blocked_by=names[number - 1] if number > opened else None)
    return found


class Sensors:
    """Ten minutes of a board that warms up."""

    def summary(self) -> dict[str, Any]:
        return {"source": "sysfs", "age_s": 0.4, "thermal": "PASSIVE"}

    def document(self) -> dict[str, Any]:
        rows = [[1000.0 + t, 9 + 6 * math.sin(t / 60), 48 + t / 40, 0.9, 6_000_000_000] for t in range(0, 600, 5)]
        return {
            "schema": 1,
            **self.summary(),
            "gpus": [{"name": "gpu", "load_ratio": 0.93}],
            "memory": {"available_bytes": 1_700_000_000},
            "throttled": ["soft-temp"],
            "notes": [],
            "history": {"columns": ["at", "power_w", "temp_c", "gpu_load_ratio", "memory_used_bytes"], "seconds": rows},
        }


async def answer(line: Line, request: Received) -> None:
    await line.stream()
    for word in ("A capacitor", " stores", " electric charge."):
        await line.chunk(f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n".encode())
        await asyncio.sleep(0.02)
    await line.chunk(
        b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":5},'
        b'"timings":{"predicted_n":5,"predicted_per_second":41.3}}\n\n'
    )
    await line.chunk(b"data: [DONE]\n\n")
    await line.end()


async def shoot(tab: Tab, name: str) -> None:
    """Light, dark and on a phone; nothing is cut off and everything can be read in each."""
    folder = os.environ.get("TEST_PICTURES")
    for look, width, dark in (
        ("light", 1100, False),
        ("dark", 1100, True),
        ("phone", 320, False),
        ("phone-dark", 390, True),
    ):
        await tab.look(width=width, dark=dark)
        await tab.until(f"innerWidth === {width}")
        assert await tab.run("document.documentElement.scrollWidth") <= width, (
            f"{name} is wider than a screen of {width}"
        )
        assert await tab.run(CONTRAST) == [], f"{name}, {look}"
        if folder:
            keep(Path(folder) / f"{name}-{look}.png", await tab.picture())
    await tab.look(width=1100)


def keep(path: Path, picture: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)


def url(here: Rig) -> str:
    return f"http://127.0.0.1:{here.port}/"


async def test_an_installer_sees_the_gates_open_and_the_model_become_ready(rig: Rigs) -> None:
    here = await rig(answer, loading=True)
    here.model.state = ModelStatus("chat", State.LOADING, gates=gates(3), progress=0.63)
    here.model.elapsed, here.model.expected_s = 12.0, 28.0
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.querySelectorAll('tbody tr').length === 6")
        assert await tab.run("document.querySelector('progress').value") == pytest.approx(0.63)
        text = await tab.run("document.body.innerText")
        assert "63 % of the weights" in text and "29 of 29 layers" in text and "waits for weights" in text
        facts = "document.querySelector('.facts').textContent"
        await tab.until(f"{facts}.endsWith('12 s of about 40 s')")
        here.model.elapsed, here.model.expected_s = 75.0, 0.0
        await tab.until(f"{facts}.endsWith('1 min 15 s, longer than the last start')")
        here.model.elapsed, here.model.expected_s = None, 40.0
        await tab.until(f"{facts}.endsWith('ready in about 40 s')")
        here.model.elapsed, here.model.expected_s = 12.0, 28.0
        await tab.until(f"{facts}.endsWith('12 s of about 40 s')")
        await tab.look(width=320)
        assert sum(node["role"] == "rowheader" for node in await tab.tree()) == 6, "a table on a phone, too"
        await tab.look(width=1100)
        nodes = await tab.tree()
        assert {"role": "progressbar", "name": "Weights"} in nodes
        assert any(node["role"] == "rowheader" and "weights : under way" in node["name"] for node in nodes)
        await shoot(tab, "loading")
        here.model.state = replace(here.model.state, gates=gates(6), progress=1.0)
        await here.model.ready(str(here.engine.path))
        await tab.until("document.querySelector('#overall').textContent === 'everything is ready'")
        await tab.until("document.querySelectorAll('rect.span').length === 6")
        assert await tab.run("document.querySelector('progress')") is None
        assert tab.complaints == [error for error in tab.complaints if "503" in error], (
            "only the probes' 503 while loading"
        )
        assert all(asked.startswith(url(here)) for asked in tab.asked), "the page loads nothing from elsewhere"


async def test_a_chat_by_keyboard_alone(rig: Rigs) -> None:
    here = await rig(answer, telemetry=Sensors())
    here.model.state = replace(here.model.state, gates=gates(6))
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.querySelector('#overall').textContent === 'everything is ready'")
        await tab.press("Tab")
        assert await tab.run("document.activeElement.className") == "skip"
        await tab.press("Enter")
        await tab.press("Tab")
        for _ in range(12):
            if await tab.run("document.activeElement.id") == "question":
                break
            await tab.press("Tab")
        await tab.write("What is a capacitor?")
        await tab.press("Enter")
        await tab.until("document.querySelector('#log').innerText.includes('A capacitor stores electric charge.')")
        await tab.until("document.querySelector('#log').getAttribute('aria-busy') === 'false'")
        assert not await tab.run("document.querySelector('#key-form').checkVisibility()"), "no key is needed here"
        assert "41.3 tokens/s" in await tab.run("document.querySelector('#speed').textContent")
        assert await tab.run("document.activeElement.id") == "question"
        await tab.until("document.querySelectorAll('polyline').length === 2")
        await tab.until("document.querySelector('#activity').innerText.includes('41.3')")
        nodes = await tab.tree()
        images = [node["name"] for node in nodes if node["role"] in ("image", "img", "graphics-document")]
        assert any(name.startswith("Temperature: 62") for name in images) and any(
            name.startswith("Power: ") for name in images
        )
        for node in nodes:
            if node["role"] in ("button", "textbox", "combobox", "link", "log", "progressbar"):
                assert node["name"], f"a {node['role']} without a name"
        await shoot(tab, "ready")
        assert json.loads(here.engine.requests[0].body)["messages"] == [
            {"role": "user", "content": "What is a capacitor?"}
        ]
        assert tab.complaints == []


async def test_a_page_asks_often_only_while_a_model_starts(rig: Rigs) -> None:
    """It may be left open for weeks, on the board itself."""
    here = await rig(answer)
    async with chromium() as tab:
        await tab.open(url(here))
        assert await tab.run("['starting', 'ok', 'degraded', 'failed'].map(pause)") == [700, 3000, 3000, 3000]


async def test_a_failure_says_what_to_do(rig: Rigs) -> None:
    here = await rig(answer, loading=True)
    here.model.state = ModelStatus("chat", State.LOADING, gates=gates(3))
    await here.model.fail("out_of_memory", "edgellm plan shows a smaller context that fits")
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.body.innerText.includes('edgellm plan shows')")
        assert await tab.run("document.querySelector('#overall').textContent") == "cannot serve"
        assert "/secret" not in await tab.run("document.body.innerText")
        await tab.run("document.querySelector('#question').focus()")
        await tab.write("Hello")
        await tab.press("Enter")
        await tab.until("!document.querySelector('#trouble').hidden")
        assert "out_of_memory" in await tab.run("document.querySelector('#trouble').textContent")
        await shoot(tab, "failed")


async def test_of_two_models_the_failed_one_is_not_offered_for_a_chat(rig: Rigs) -> None:
    """Shown as failed at the gate that failed; the other one is busy meanwhile."""
    go = asyncio.Event()

    async def slowly(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b'data: {"choices":[{"delta":{"content":"A capacitor"}}]}\n\n')
        await go.wait()
        await line.chunk(b"data: [DONE]\n\n")
        await line.end()

    one = await rig(slowly)
    models = {"chat": one.model, "large": FakeModel("large")}
    models["chat"].state = replace(models["chat"].state, gates=gates(6))
    models["large"].state = ModelStatus("large", State.LOADING, gates=gates(3))
    here = await rig(models=models)
    options = "[...document.querySelectorAll('#which option')].map((each) => each.value)"
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until(f"{options}.join() === 'chat,large'")
        assert await tab.run("document.querySelector('#which').checkVisibility()")
        # The gates before the one that failed are closed with their process.
        gone = {name: Gate(blocked_by="weights" if name in ("kv_cache", "warm") else None) for name in gates(0)}
        models["large"].state = replace(models["large"].state, gates={**gone, "driver": Gate(True)})
        await models["large"].fail("out_of_memory", "edgellm plan shows a smaller context that fits")
        await tab.until(f"{options}.join() === 'chat'")
        assert not await tab.run("document.querySelector('#which').checkVisibility()"), "there is no choice"
        headline = "document.querySelector('#overall').textContent + document.querySelector('#overall').className"
        assert await tab.run(headline) == "1 of 2 models cannot serve" + "state warn"
        nodes = await tab.tree()
        rows = [node["name"] for node in nodes if node["role"] == "rowheader"]
        assert [name for name in rows if ": failed" in name] == ["weights : failed"], rows
        await shoot(tab, "two")
        await tab.run("document.querySelector('#question').focus()")
        await tab.write("What is a capacitor?")
        await tab.press("Enter")
        await tab.until("document.querySelector('#log').innerText.includes('A capacitor')")
        figures = "[...document.querySelectorAll('#activity dt')].map((each) => each.nextSibling.textContent)"
        await tab.until("document.querySelector('#activity').innerText.includes('in flight')")
        labels = await tab.run("[...document.querySelectorAll('#activity dt')].map((each) => each.textContent)")
        await tab.until(f"{figures}[{labels.index('in flight')}] === '1'")
        assert await tab.run("document.querySelector('#send').disabled")
        assert not await tab.run("document.querySelector('#stop').disabled")
        await shoot(tab, "busy")
        go.set()
        await tab.until("!document.querySelector('#send').disabled")
        assert json.loads(one.engine.requests[-1].body)["model"] == "chat"


class FullSensors(Sensors):
    """A board that measures all that the page can show."""

    def document(self) -> dict[str, Any]:
        zone = {"name": "tj", "celsius": 62.0, "passive_c": 95.0, "hot_c": None, "critical_c": 105.0, "limits": True}
        case = {**zone, "name": "case", "passive_c": 50.0, "limits": False}
        mode = {"id": 0, "name": "MAXN_SUPER", "source": "nvpmodel"}
        return {**super().document(), "temp_c": 62.0, "temperatures": [zone, case], "power_mode": mode}


async def test_the_facts_and_the_curves_of_a_board_that_measures_all(rig: Rigs) -> None:
    about = {"board": "Jetson Orin Nano 8GB", "engine": "cuda-87-b8000", "engine_page": False}
    here = await rig(answer, telemetry=FullSensors(), about=lambda: about)
    here.model.model_info = {"arch": "qwen3", "n_params": 4_022_468_096, "ftype": "Q4_K_M", "n_ctx": 8192, "size": 5}
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.querySelectorAll('#figures figure').length === 4")
        said = "Jetson Orin Nano 8GB, engine cuda-87-b8000, power mode MAXN_SUPER"
        assert await tab.run("document.querySelector('#about').textContent") == said
        facts = "document.querySelector('.facts').textContent"
        assert await tab.run(facts) == "qwen3, 4.0 B parameters, Q4_K_M, context 8192"
        figures = "[...document.querySelectorAll('#figures figcaption')]"
        captions = await tab.run(f"{figures}.map((each) => each.textContent)")
        titles = [caption.partition(":")[0] for caption in captions]
        assert titles == ["Temperature", "Power", "GPU load", "Memory used"]
        assert captions[0].endswith("slowed down from 95 °C"), "not from the case's 50 °C, which limits nothing"
        assert "90.0 %" in captions[2] and "5.6 GiB" in captions[3]
        trips = await tab.run("[...document.querySelectorAll('path.trip')].map((each) => each.getAttribute('d'))")
        assert trips == ["M0,8.0 L600,8.0"], "one line, in the temperature's figure, at its top"
        await shoot(tab, "board")


async def test_thinking_is_folded_and_an_answer_that_was_cut_says_it(rig: Rigs) -> None:
    async def cut(line: Line, request: Received) -> None:
        await line.stream()
        for delta in ({"reasoning_content": "Let me"}, {"reasoning_content": " think."}, {"content": "A capacitor"}):
            await line.chunk(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
        await line.chunk(b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n')
        await line.chunk(b"data: [DONE]\n\n")
        await line.end()

    here = await rig(cut)
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.run("document.querySelector('#question').focus()")
        await tab.write("What is a capacitor?")
        await tab.press("Enter")
        await tab.until("!document.querySelector('#trouble').hidden")
        await tab.until("!document.querySelector('#send').disabled")
        trouble = await tab.run("document.querySelector('#trouble').textContent")
        assert trouble == "The answer ends here because it reached its length limit."
        details = "document.querySelector('#log li.theirs details')"
        assert await tab.run(f"{details}.open") is False
        assert await tab.run(f"{details}.querySelector('span').textContent") == "Let me think."
        assert not await tab.run(f"{details}.querySelector('span').checkVisibility()")
        assert await tab.run("document.querySelector('#log li.theirs').lastChild.textContent") == "A capacitor"
        await shoot(tab, "thinking")


async def test_a_degraded_model_is_no_secret(rig: Rigs) -> None:
    here = await rig(answer, telemetry=Sensors())
    less = (
        Degraded("n_ctx", "8192", "4096", "memory was taken meanwhile"),
        Degraded("speed", "41 tokens/s", "12 tokens/s", "heat"),
    )
    here.model.state = replace(here.model.state, gates=gates(6), degraded=less, rung=1, restarts=2)
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.body.innerText.includes('n_ctx: 4096 instead of 8192')")
        assert "restarted 2 times" in await tab.run("document.body.innerText")
        await shoot(tab, "degraded")


async def test_a_key_is_asked_for_and_kept_for_this_tab_only(rig: Rigs, tmp_path: Path) -> None:
    secret = keys.new_secret()
    keys.write(tmp_path / "keys.toml", [keys.make("tab", secret, admin=False, created="", others=())])
    here = await rig(answer, config=GatewayOptions(keys_file=tmp_path / "keys.toml"))
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.querySelector('#key-form').checkVisibility()")
        await shoot(tab, "key")
        await tab.run("document.querySelector('#key').focus()")
        await tab.write(secret)
        await tab.press("Enter")
        await tab.until("!document.querySelector('#key-form').checkVisibility()")
        await tab.until("document.querySelector('#activity').innerText.includes('answered')")
        await tab.run("document.querySelector('#question').focus()")
        await tab.write("Hello")
        await tab.press("Enter")
        await tab.until("document.querySelector('#log').innerText.includes('electric charge')")
        assert secret not in await tab.run(
            "document.documentElement.outerHTML + document.cookie + JSON.stringify(localStorage)"
        )


async def test_the_last_starts_are_waterfalls(rig: Rigs) -> None:
    here = await rig(answer)
    past = here.context.history = Past()
    past.records[-1] |= {"engine": "embedded-1", "cache_state": {"resident_ratio": 0.25}}
    past.records[-2] |= {"outcome": "failed: out_of_memory", "ready_s": None}
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.querySelectorAll('#waterfalls details').length === 5")
        text = await tab.run("document.querySelector('#starts').innerText")
        assert "chat: ready after 2.5 s, embedded-1, 25 % of the file was in memory" in text
        assert "chat: failed: out_of_memory" in text
        assert await tab.run("[...document.querySelectorAll('#waterfalls details')].map((each) => each.open)") == [
            True,
            *[False] * 4,
        ]
        bar = "document.querySelector('#waterfalls rect.span')"
        assert float(await tab.run(f"{bar}.getAttribute('x')")) == pytest.approx(20, abs=0.1)
        assert float(await tab.run(f"{bar}.getAttribute('width')")) == pytest.approx(60, abs=0.1)
        assert {"role": "rowheader", "name": "weights"} in await tab.tree()
        await shoot(tab, "starts")


async def test_the_log_is_followed_with_an_admin_key(rig: Rigs, tmp_path: Path) -> None:
    owner, user = keys.new_secret(), keys.new_secret()
    first = keys.make("owner", owner, admin=True, created="", others=())
    keys.write(tmp_path / "keys.toml", [first, keys.make("user", user, admin=False, created="", others=(first,))])
    here = await rig(answer, config=GatewayOptions(keys_file=tmp_path / "keys.toml"))
    past = here.context.history = Past()
    past.own.add("chat is ready <b>")
    past.engine.add("srv  update_slots: all slots are idle")
    async with chromium() as tab:
        for secret, shown in ((user, False), (owner, True)):
            await tab.open(url(here))
            await tab.run(f"sessionStorage.setItem('key', '{secret}')")
            await tab.open(url(here))
            await tab.until("document.querySelector('#activity').innerText.includes('answered')")
            assert await tab.run("document.querySelector('#live').checkVisibility()") is shown
        await tab.run("document.querySelector('#follow').click()")
        await tab.until("document.querySelector('#lines').textContent === 'chat is ready <b>\\n'")
        past.own.add("one request more")
        await tab.until("document.querySelector('#lines').textContent === 'chat is ready <b>\\none request more\\n'")
        await shoot(tab, "log")
        source = (
            "const box = document.querySelector('#source'); box.value = '1'; box.dispatchEvent(new Event('change'))"
        )
        await tab.run(f"(() => {{ {source} }})()")
        await tab.until("document.querySelector('#lines').textContent.startsWith('srv  update_slots')")
        assert await tab.run("[...document.querySelectorAll('.actions button')].map((each) => each.textContent)") == [
            "load",
            "unload",
            "restart",
        ]
        await tab.run("document.querySelectorAll('.actions button')[1].click()")
        await until(lambda: here.model.actions == ["unload"])


class NoSensors(Sensors):
    """A virtual machine: nothing measures heat, power or GPU."""

    def document(self) -> dict[str, Any]:
        none = {"schema": 1, "source": "host", "age_s": 0.4, "thermal": "NOMINAL", "gpus": [], "throttled": []}
        memory = {"available_bytes": 1_700_000_000}
        return {**none, "temp_c": None, "notes": [], "memory": memory, "history": {"columns": [], "seconds": []}}


async def test_what_is_unknown_is_shown_as_unknown(rig: Rigs) -> None:
    """ "nominal" without a sensor and 0.0 tokens/s before an answer were lies."""
    here = await rig(answer, telemetry=NoSensors())
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.until("document.querySelector('#figures').innerText.includes('thermal level')")
        figures = await tab.run("document.querySelector('#figures').innerText")
        assert "unknown" in figures and "nominal" not in figures and "GPU load" not in figures
        activity = await tab.run("document.querySelector('#activity').innerText")
        assert "0.0" not in activity and activity.count("–") >= 2, "tokens/s and tokens/joule"
        assert not await tab.run("document.querySelector('#starts').checkVisibility()")


async def test_a_long_answer_can_be_stopped_and_the_slot_is_free(rig: Rigs) -> None:
    async def endless(line: Line, request: Received) -> None:
        await line.stream()
        while not line.gone.is_set():
            await line.chunk(b'data: {"choices":[{"delta":{"content":"on and "}}]}\n\n')
            await asyncio.sleep(0.01)

    here = await rig(endless)
    async with chromium() as tab:
        await tab.open(url(here))
        await tab.run("document.querySelector('#question').focus()")
        await tab.write("Never stop")
        await tab.press("Enter")
        await tab.until("document.querySelector('#log').innerText.includes('on and on and')")
        await tab.run("document.querySelector('#stop').click()")
        await tab.until("!document.querySelector('#send').disabled")
        for _ in range(400):
            if here.model.open == 0:
                break
            await asyncio.sleep(0.05)
        assert here.model.open == 0


async def test_llama_cpps_own_page_chats_under_its_path(rig: Rigs, smollm2: Path, sockets: Path) -> None:
    """Its addresses are relative: it finds the engine behind /upstream/chat/, of which the gateway knows nothing."""
    with real_engine(smollm2, sockets / "ui.sock", ui=True, use_jinja=True, model_alias=["chat"]):
        here = await rig(
            models={"chat": FakeModel("chat", str(sockets / "ui.sock"))}, about=lambda: {"engine_page": True}
        )
        async with chromium() as tab:
            await tab.open(url(here))
            await tab.until("document.querySelector('p.page a') !== null")
            await tab.run("document.querySelector('p.page a').click()")
            await tab.until("location.pathname === '/upstream/chat/' && document.querySelector('textarea') !== null")
            await tab.run("document.querySelector('textarea').focus()")
            await tab.write("Say hello.")
            await tab.press("Enter")
            await tab.until("/[1-9][0-9]* tokens/.test(document.body.innerText)")
            assert any(asked.endswith("/upstream/chat/v1/chat/completions") for asked in tab.asked)
            assert all(asked.startswith(url(here)) for asked in tab.asked), "nothing is loaded from elsewhere"
