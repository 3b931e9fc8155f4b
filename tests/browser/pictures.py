"""Take the README's pictures of a running edgellm: `python -m tests.browser.pictures [FOLDER]`.

The demo model answers on this machine's CPU; the sensors are those of a recreated board, which warms up meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from edge.cli.client import Client
from edge.cli.top import Past, screen
from edge.models.pull import pull
from edge.paths import folders
from tests.browser.chromium import chromium
from tests.fakes.fake_jetson.tree import FakeBoard, fake_board
from tests.serving import DEMO, PATIENCE_S, ROOT, Up

IMAGES = ROOT / "docs" / "images"
BOARD = "orin-nano-8"
COLUMNS, LINES = 96, 24
PAGE_WIDTH, PAGE_HEIGHT = 900, 1102
SECONDS = 45  # of curves
QUESTION = "What is a capacitor? Answer in two sentences."
PAGE = """<!doctype html><style>{stylesheet}
body {{ margin: 0; background: {background}; color: {foreground} }}
pre {{ margin: 0; padding: 12px; display: inline-block; font: 14px/1.25 "DejaVu Sans Mono", monospace }}
</style><body><pre>{code}</pre></body>"""


def take(folder: Path, seconds: int = SECONDS) -> None:
    """Write status.png and top.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures-") as place, fake_board(BOARD) as board:
        model = Path(pull(DEMO, Path(place) / "models").path)
        program = [str(ROOT / "tests/fakes/up_on_board.py"), str(board.root), "10"]
        with Up(Path(place) / "s", "-p", "cpu", "-m", f"chat={model}", "--set", "n_ctx=8192", program=program) as up:
            up.wait_for("ok", "degraded")
            client = Client(folders({}, up.state))
            past = Past()
            with working(up, board) as ended:
                for second in range(seconds):
                    warm(board, second)
                    past.add(client.telemetry())
                    ended.wait(1.0)
                html = drawn(client, past)
                client.close()
                asyncio.run(shoot(up.url, html, folder))


def warm(board: FakeBoard, second: int) -> None:
    """Set the sensors of this second: a board at work, from 52 to about 70 °C."""
    board.set_all_temps(70 - 18 * math.exp(-second / 20))
    board.set_total_power(14.2 + 1.5 * math.sin(second / 3))
    board.set_gpu(load=88 + 8 * math.sin(second / 2), mhz=918)
    board.set_memory(used_kb=5_200_000, cached_kb=1_400_000, gpu_kb=3_600_000)


@contextmanager
def working(up: Up, board: FakeBoard) -> Iterator[threading.Event]:
    """Ask for one answer after the other until the end."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            up.chat(QUESTION, max_tokens=48, timeout=PATIENCE_S)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield ended
    finally:
        ended.set()
        asking.join(PATIENCE_S)


def drawn(client: Client, past: Past) -> str:
    """Return the screen of `edgellm top` as HTML."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(screen(client.status(), client.telemetry(), past, COLUMNS, LINES))
    return console.export_html(theme=MONOKAI, inline_styles=False, code_format=PAGE)


async def shoot(url: str, html: str, folder: Path) -> None:
    pictures = {}
    async with chromium() as tab:
        await tab.open(url, width=PAGE_WIDTH, height=PAGE_HEIGHT)
        await tab.until("document.querySelector('#overall').textContent === 'everything is ready'")
        await tab.until("document.querySelectorAll('polyline').length === 2")
        await tab.run("document.querySelector('#question').focus()")
        await tab.write(QUESTION)
        await tab.press("Enter")
        await tab.until("document.querySelector('#speed').textContent.includes('tokens/s')")
        await tab.run("document.activeElement.blur(), scrollTo(0, 0)")
        pictures["status.png"] = await tab.picture(whole=False)
        await tab.open("data:text/html;charset=utf-8;base64," + base64.b64encode(html.encode()).decode())
        width, height = await tab.run("(p => [p.offsetWidth, p.offsetHeight])(document.querySelector('pre'))")
        await tab.look(width=width, height=height)
        pictures["top.png"] = await tab.picture()
    for name, picture in pictures.items():
        keep(folder / name, picture)


def keep(path: Path, picture: bytes) -> None:
    path.write_bytes(picture)


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
