"""Debian's Chromium over its DevTools protocol: enough to open a page, press keys, look at it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

LIMIT_S = 60.0
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27}


def installed() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One page. `complaints` holds console errors, exceptions and blocked loads; `asked` every URL it loaded."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._listening = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.asked.append(event["params"]["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.complaints.append(event["params"]["entry"]["text"] + " " + event["params"]["entry"].get("url", ""))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        document = await asyncio.wait_for(answer, LIMIT_S)
        if "error" in document:
            raise RuntimeError(f"{method}: {document['error']}")
        result: dict[str, Any] = document["result"]
        return result

    async def open(self, url: str, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.look(width=width, height=height, dark=dark)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def run(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:800])
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        for _ in range(int(LIMIT_S / 0.05)):
            with contextlib.suppress(RuntimeError):
                if await self.run(expression):
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}\n{await self.run('document.body.innerText')}")

    async def press(self, key: str) -> None:
        code = KEYS[key]
        text = "\r" if key == "Enter" else ""
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, text=text
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self, *, whole: bool = True) -> bytes:
        """Return a PNG of the whole page, or only of what is in view."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    async def tree(self) -> list[dict[str, Any]]:
        """Return the accessibility tree: role and name of each node."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            {"role": node.get("role", {}).get("value"), "name": node.get("name", {}).get("value", "")}
            for node in nodes
            if not node.get("ignored")
        ]

    async def close(self) -> None:
        self._listening.cancel()
        await self._socket.close()


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Tab]:
    program = installed()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        child = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars",
            "--disable-extensions", "--disable-background-networking", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile))
            async with aiohttp.ClientSession() as session:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    address = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
                tab = Tab(await session.ws_connect(address, max_msg_size=0))
                try:
                    yield tab
                finally:
                    await tab.close()
        finally:
            child.terminate()
            await child.wait()


async def _port(profile: Path) -> int:
    found = profile / "DevToolsActivePort"
    for _ in range(int(LIMIT_S / 0.05)):
        if found.exists() and (text := found.read_text()):
            return int(text.splitlines()[0])
        await asyncio.sleep(0.05)
    raise AssertionError("chromium did not open its port")
