"""The control socket: access for the owner, root and the group, and its answers."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from edge.daemon.control import Control, LogQuestion, log_lines
from edge.daemon.residents import Restarted
from edge.errors import ConfigError
from edge.linux.files import private_dir
from edge.linux.procfs import Ring
from edge.paths import folders
from tests.serving import ROOT


class Application:
    """Operations that record their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def status(self) -> dict[str, Any]:
        return {"schema": 1, "status": "ok"}

    def telemetry(self) -> dict[str, Any]:
        return {"schema": 1, "source": "none"}

    def logs(self, asked: LogQuestion) -> dict[str, Any]:
        self.calls.append(asked)
        return {"lines": ["a"], "next": {"": 1}}

    def stop(self, now: bool) -> None:
        self.calls.append(("stop", now))

    def restart(self, model_id: str | None) -> Restarted:
        return Restarted(["chat"] if model_id == "chat" else [], ["night"] if model_id is None else [])

    async def reload(self) -> dict[str, Any]:
        raise ConfigError("profil: unknown key", "did you mean profile?")


class Reloadable(Application):
    async def reload(self) -> dict[str, Any]:
        return {"schema": 1, "models": {"chat": "kept"}, "failures": {}}


@asynccontextmanager
async def control(folder: Path, *, for_group: bool = False) -> AsyncIterator[tuple[Application, aiohttp.ClientSession]]:
    application = Application()
    served = Control(folder / "c.sock", application, for_group=for_group)
    await served.start()
    connector = aiohttp.UnixConnector(path=str(folder / "c.sock"))
    try:
        async with aiohttp.ClientSession("http://edgellm", connector=connector) as session:
            yield application, session
    finally:
        await served.close()
        assert not (folder / "c.sock").exists()


@pytest.mark.parametrize(("for_group", "mode"), [(False, 0o600), (True, 0o660)])
async def test_the_mode_of_the_socket(short_dir: Path, for_group: bool, mode: int) -> None:
    async with control(short_dir, for_group=for_group):
        assert stat.S_IMODE((short_dir / "c.sock").stat().st_mode) == mode


async def test_what_a_former_holder_left_behind_is_replaced(short_dir: Path) -> None:
    (short_dir / "c.sock").write_text("")
    async with control(short_dir) as (_, session), session.get("/status") as answer:
        assert (await answer.json())["status"] == "ok"


async def test_an_engines_line_cannot_command_the_terminal(short_dir: Path) -> None:
    """OSC 52 would write to the clipboard, and a line break would forge a line."""

    class Printing(Application):
        def logs(self, asked: LogQuestion) -> dict[str, Any]:
            return log_lines(asked, Ring(), {"chat": engine})

    engine = Ring()
    engine.add("a\x1b]52;c;cm0gLXJm\x07b\x1b[2J\x9b31m\u202e\nI forged")
    places = folders({}, short_dir)
    private_dir(places.run)
    private_dir(places.instance_run)
    served = Control(places.control_socket, Printing())
    await served.start()
    try:
        command = (sys.executable, "-m", "edge", "logs", "--engine", "--state-dir", str(short_dir))
        child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
        printed = (await child.communicate())[0].decode()
    finally:
        await served.close()
    shown = r"a\x1b]52;c;cm0gLXJm\x07b\x1b[2J\x9b31m\u202e\nI forged"
    assert (child.returncode, printed) == (0, shown + "\n")


async def test_answers(short_dir: Path) -> None:
    async with control(short_dir) as (application, session):
        async with session.get("/logs", params={"engine": "1", "model": "m", "since": '{"m": 7, "x": "y"}'}) as answer:
            assert (await answer.json())["lines"] == ["a"]
        async with session.get("/logs", params={"since": "garbage"}) as answer:
            assert answer.status == 200
        async with session.post("/restart", params={"model": "other"}) as answer:
            assert answer.status == 404
        async with session.post("/restart", params={"model": "chat"}) as answer:
            assert answer.status == 202
        async with session.post("/restart") as answer:
            assert (answer.status, (await answer.json())["asleep"]) == (202, ["night"])
        async with session.post("/stop", params={"now": "1"}) as answer:
            assert answer.status == 202
        async with session.post("/reload") as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["kind"], error["hint"]) == (422, "config", "did you mean profile?")
        assert application.calls == [LogQuestion(True, "m", {"m": 7}), LogQuestion(), ("stop", True)]


ASK = """
import os, socket, sys
os.setgroups([int(sys.argv[2])]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
socket.setdefaulttimeout(60)
for line in ("GET /status", "POST /stop", "POST /restart", "POST /reload"):
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(sys.argv[1])
        except PermissionError:
            print("closed"); continue
        s.sendall((line + " HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Length: 0\\r\\n\\r\\n").encode())
        print(s.recv(64).split()[1].decode())
"""


def opened(folder: Path) -> None:
    """A folder that other users may enter."""
    folder.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs other users")
@pytest.mark.parametrize(
    ("for_group", "member", "expected"),
    [(False, True, ["closed"] * 4), (True, False, ["closed"] * 4), (True, True, ["200", "403", "403", "403"])],
    ids=["a user's own", "a service's, a stranger", "a service's, its group"],
)
async def test_the_group_looks_and_only_the_owner_and_root_change(
    short_dir: Path, for_group: bool, member: bool, expected: list[str]
) -> None:
    group = 4242
    opened(short_dir)
    async with control(short_dir, for_group=for_group) as (application, _):
        if for_group:
            os.chown(short_dir / "c.sock", -1, group)
        asked = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ASK, str(short_dir / "c.sock"), str(group if member else 4343),
            stdout=subprocess.PIPE,
        )  # fmt: skip
        printed, _ = await asked.communicate()
        assert printed.decode().split() == expected
        assert application.calls == []


MANY = """
import os, socket, sys
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(65534, 65534, 65534); socket.setdefaulttimeout(60)
kept = [socket.socket(socket.AF_UNIX) for _ in range(40)]
for each in kept:
    each.connect(sys.argv[1])
print(sum(each.recv(12) == b"HTTP/1.1 503" for each in kept[8:]), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes the place of another user")
async def test_a_member_of_the_group_keeps_no_more_than_a_few_connections(short_dir: Path) -> None:
    """Connections without a request were kept without a limit, and took the gateway's descriptors."""
    opened(short_dir)
    async with control(short_dir, for_group=True) as (_, session):
        os.chown(short_dir / "c.sock", -1, 4242)
        member = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MANY, str(short_dir / "c.sock"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert member.stdout is not None
        assert int(await member.stdout.readline()) == 32
        async with session.get("/status") as answer:
            assert answer.status == 200, "the owner is served meanwhile"
        await member.communicate(b"")


async def test_numbers_of_a_reader_may_be_anything(short_dir: Path) -> None:
    async with control(short_dir) as (application, session):
        for wrong in ("[" * 2000, '{"": NaN}', "1", '{"": 1e999}', "{"):
            async with session.get("/logs", params={"since": wrong}) as answer:
                assert answer.status == 200
        assert {len(asked.since) for asked in application.calls} == {0}


async def test_a_reload_that_works_is_passed_on(short_dir: Path) -> None:
    served = Control(short_dir / "c.sock", Reloadable())
    await served.start()
    connector = aiohttp.UnixConnector(path=str(short_dir / "c.sock"))
    async with (
        aiohttp.ClientSession("http://edgellm", connector=connector) as session,
        session.post("/reload") as answer,
    ):
        assert json.loads(await answer.text())["models"] == {"chat": "kept"}
    await served.close()
