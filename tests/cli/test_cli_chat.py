from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from edge.cli import main
from edge.cli.chat import Answer, reachable
from edge.gateway.config import GatewayOptions
from tests.fakes.upstream.engine import Line, Received, Script
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rig, Rigs, rig, sockets
from tests.gateway.raw import LIMIT_S, until
from tests.serving import ROOT

__all__ = ["rig", "sockets"]  # fixtures


async def chat(here: Rig, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["chat", "--url", f"http://127.0.0.1:{here.port}", *arguments])


def delta(text: str, **more: object) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}], **more})}\n\n".encode()


async def story(line: Line, request: Received) -> None:
    await line.stream()
    await line.chunk(b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n')
    for word in ("A capacitor", " stores", " charge\u2026"):
        await line.chunk(delta(word))
    await line.chunk(b'data: {"choices":[{"finish_reason":"stop","delta":{}}]}\n\n')
    await line.chunk(
        b'data: {"choices":[],"usage":{"completion_tokens":3},"timings":{"predicted_per_second":41.26}}\n\n'
    )
    await line.chunk(b"data: [DONE]\n\n")
    await line.end()


async def test_the_answer_is_printed_as_it_comes(rig: Rigs, capsys: pytest.CaptureFixture[str]) -> None:
    here = await rig(story)
    assert await chat(here, "What", "is a capacitor?", "--system", "Be brief.", "-m", "chat") == 0
    assert capsys.readouterr().out == "A capacitor stores charge\u2026\n"
    asked = json.loads(here.engine.requests[0].body)
    assert asked["messages"][1] == {"role": "user", "content": "What is a capacitor?"}
    assert (asked["messages"][0]["role"], asked["stream"], asked["model"]) == ("system", True, "chat")


async def test_json_is_one_document(rig: Rigs, capsys: pytest.CaptureFixture[str]) -> None:
    assert await chat(await rig(story), "Hello", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["text"], document["finish_reason"]) == (
        1,
        "A capacitor stores charge\u2026",
        "stop",
    )
    assert document["usage"] == {"completion_tokens": 3}


def thinking(finish: str | None) -> Script:
    """An answer with thinking before it, which ends with `finish`; None: the stream just ends."""

    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b'data: {"choices":[{"delta":{"reasoning_content":"Let me think."}}]}\n\n')
        await line.chunk(delta("Forty\x1b]52;c;QUJD\x07 two"))
        if finish:
            await line.chunk(f'data: {{"choices":[{{"finish_reason":"{finish}","delta":{{}}}}]}}\n\n'.encode())
            await line.chunk(b"data: [DONE]\n\n")
        await line.end()

    return script


async def test_thinking_is_kept_apart(rig: Rigs, capsys: pytest.CaptureFixture[str]) -> None:
    assert await chat(await rig(thinking("stop")), "Hello") == 0
    assert capsys.readouterr().out == "Forty\x1b]52;c;QUJD\x07 two\n", "a pipe gets the text as it is"
    assert await chat(await rig(thinking("stop")), "Hello", "--json") == 0
    assert json.loads(capsys.readouterr().out)["reasoning"] == "Let me think."


@pytest.mark.parametrize(("finish", "said"), [("length", "cut after 1024 tokens"), (None, "the answer broke off")])
async def test_an_answer_that_is_not_complete_is_no_success(
    rig: Rigs, finish: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await chat(await rig(thinking(finish)), "Hello") == 1
    shown = capsys.readouterr()
    assert "two" in shown.out and said in shown.err


STOP = '{"choices":[{"finish_reason":"stop","delta":{}}]}'


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (['{"error":"boom"}'], "boom"),
        (['{"error":"boom"}', STOP, "[DONE]"], "boom"),
        (['{"type":"error","error":{"type":"overloaded_error","message":"too busy"}}'], "too busy"),
        (['{"object":"error","message":"too long","code":400}', "[DONE]"], "too long"),
        (['{"choices":[{"finish_reason":"error","delta":{}}]}', "[DONE]"], "the answer broke off"),
        (['{"choices":[null]}'], "the answer broke off"),
        (['{"choices":[{"delta":"text"}]}'], "the answer broke off"),
        (['{"choices":{"0":1}}'], "the answer broke off"),
        (["[" * 100_000], "the answer broke off"),
        (["<html>502</html>"], "the answer broke off"),
        (["[DONE]"], "the answer broke off"),
        ([], "the answer broke off"),
    ],
)
async def test_a_stream_of_another_shape_is_no_success(
    rig: Rigs, events: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        for event in events:
            await line.chunk(f"data: {event}\n\n".encode())
        await line.end()

    assert await chat(await rig(script), "Hello") == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"error": {"message": "no room"}}, "no room"),
        ({"error": "no room"}, "no room"),
        ({"choices": [{"message": {"content": "x"}}]}, "the answer broke off"),
    ],
)
async def test_a_document_in_place_of_a_stream_is_no_success(
    rig: Rigs, document: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.json(document, "200 OK")

    assert await chat(await rig(script), "Hello") == 1
    assert said in capsys.readouterr().err


async def test_a_whole_answer_in_place_of_a_stream_is_shown(rig: Rigs, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.json({"choices": [{"message": {"content": "Paris."}, "finish_reason": "stop"}]}, "200 OK")

    assert await chat(await rig(script), "Hello") == 0
    assert capsys.readouterr().out == "Paris.\n"


async def test_figures_of_another_shape_spoil_no_answer(rig: Rigs, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(delta("Fine.", usage=[1], timings={"predicted_per_second": "fast"}))
        await line.chunk(f"data: {STOP}\n\n".encode())
        await line.chunk(b"data: [DONE]\n\n")
        await line.end()

    assert await chat(await rig(script), "Hello") == 0
    assert capsys.readouterr().out == "Fine.\n"
    assert Answer(timings={"predicted_per_second": 10**400}).summary == ""


async def test_figures_are_shown_on_a_terminal_and_not_obeyed(rig: Rigs) -> None:
    """OSC 52 in a server's count of tokens wrote to the clipboard."""

    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(delta("Fine.", usage={"completion_tokens": "\x1b]52;c;QUJD\x07\u202e"}))
        await line.chunk(f"data: {STOP}\n\ndata: [DONE]\n\n".encode())
        await line.end()

    here = await rig(script)
    process, terminal = on_terminal("chat", "Hello", "--url", f"http://127.0.0.1:{here.port}")
    shown = bytearray()
    await asyncio.to_thread(read_until, terminal, shown, b"tokens", 1)
    os.close(terminal)
    await asyncio.to_thread(process.wait, 60)
    assert b"\\x1b]52;c;QUJD\\x07\\u202e tokens" in shown and b"\x1b]52" not in shown


async def test_an_answer_of_the_length_that_was_asked_for_is_a_success(
    rig: Rigs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await chat(await rig(thinking("length")), "Hello", "--max-tokens", "5") == 0
    assert "cut after 5 tokens" in capsys.readouterr().err


async def test_of_several_models_the_first_is_asked(rig: Rigs) -> None:
    """`edgellm chat TEXT` works without -m too, though the gateway wants a name then."""
    one = await rig(story)
    models = {name: FakeModel(name, str(one.engine.path)) for name in ("b", "c")}
    assert await chat(await rig(models=models), "Hello") == 0
    asked = [json.loads(request.body) for request in one.engine.requests if request.body]
    assert [body["model"] for body in asked] == ["b"]


@pytest.mark.parametrize("role", ["embedding", "rerank"])
async def test_a_model_that_cannot_chat_is_never_the_first(
    rig: Rigs, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 12: `edgellm chat TEXT` sent its question to an embedding model that was configured first."""
    one = await rig(story)
    models = {name: FakeModel(name, str(one.engine.path)) for name in ("a", "b")}
    models["a"].model_info["capabilities"] = [role]
    models["b"].model_info["capabilities"] = ["completion", "vision"]
    assert await chat(await rig(models=models), "Hello") == 0
    assert json.loads(one.engine.requests[-1].body)["model"] == "b"
    del models["b"]
    one.engine.requests.clear()
    assert await chat(await rig(models=models), "Hello") == 69
    assert "no model here can chat: a" in capsys.readouterr().err
    assert not any(request.body for request in one.engine.requests)


# Makes standard input the controlling terminal, and undoes a SIGINT that is ignored (as by a job in the background):
# only then Ctrl-C is a SIGINT.
ON_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "edge", *sys.argv[1:]])
"""


def on_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on a terminal of its own; return it and the other side of the terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", ON_TERMINAL, *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True)
    os.close(theirs)
    return process, ours


def read_until(terminal: int, shown: bytearray, mark: bytes, count: int) -> None:
    """Read what the terminal shows, behind what was read before, until `mark` stands in it that often."""
    while shown.count(mark) < count:
        shown += os.read(terminal, 4096)


async def test_a_conversation_on_a_terminal(rig: Rigs) -> None:
    """The history goes along, thinking is shown, control characters are not obeyed, /exit ends it."""
    here = await rig(thinking("stop"))
    process, ours = on_terminal("chat", "-m", "chat", "--url", f"http://127.0.0.1:{here.port}")
    shown = bytearray()
    try:
        for number, line in enumerate((b"first\n", b"second\n", b"/exit\n"), 1):
            await asyncio.to_thread(read_until, ours, shown, b"> ", number)
            os.write(ours, line)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        os.close(ours)
    assert b"\x1b[2mLet me think." in shown and rb"Forty\x1b]52;c;QUJD\x07 two" in shown and b"\x1b]52" not in shown
    asked = [json.loads(request.body)["messages"] for request in here.engine.requests if request.body]
    assert [len(messages) for messages in asked] == [1, 3]
    assert asked[1][1]["role"] == "assistant" and asked[1][2]["content"] == "second"


async def test_ctrl_c_stops_an_answer_and_the_history_keeps_its_half(rig: Rigs) -> None:
    stopped = asyncio.Event()

    async def script(line: Line, request: Received) -> None:
        if stopped.is_set():
            await story(line, request)
            return
        await line.stream()
        await line.chunk(delta("Forty"))
        await line.until_gone()
        stopped.set()

    here = await rig(script)
    process, ours = on_terminal("chat", "-m", "chat", "--url", f"http://127.0.0.1:{here.port}")
    shown = bytearray()
    try:
        await asyncio.to_thread(read_until, ours, shown, b"> ", 1)
        os.write(ours, b"first\n")
        await asyncio.to_thread(read_until, ours, shown, b"Forty", 1)
        os.write(ours, b"\x03")
        await asyncio.to_thread(read_until, ours, shown, b"(stopped)", 1)
        await asyncio.wait_for(stopped.wait(), LIMIT_S)
        await asyncio.to_thread(read_until, ours, shown, b"> ", 2)
        os.write(ours, b"go on\n")
        await asyncio.to_thread(read_until, ours, shown, b"> ", 3)
        os.write(ours, b"/exit\n")
        assert await asyncio.to_thread(process.wait, LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    asked = [json.loads(request.body)["messages"] for request in here.engine.requests if request.body]
    assert [len(messages) for messages in asked] == [1, 3]
    assert asked[1][1:] == [{"role": "assistant", "content": "Forty"}, {"role": "user", "content": "go on"}]
    assert b"Traceback" not in shown and b"charge" in shown


@pytest.mark.parametrize("arguments", [("-",), ()])
async def test_a_question_comes_through_a_pipe(rig: Rigs, arguments: tuple[str, ...]) -> None:
    here = await rig(story)
    command = [sys.executable, "-m", "edge", "chat", *arguments, "-m", "chat", "--url", f"http://127.0.0.1:{here.port}"]
    done = await asyncio.to_thread(
        subprocess.run, command, input="What is\na capacitor\u2026\n".encode(), capture_output=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == "A capacitor stores charge\u2026\n"
    asked = json.loads(here.engine.requests[-1].body)
    assert asked["messages"] == [{"role": "user", "content": "What is\na capacitor\u2026"}]


async def test_it_waits_for_the_model(rig: Rigs, capsys: pytest.CaptureFixture[str]) -> None:
    here = await rig(story, loading=True)
    asked = asyncio.ensure_future(chat(here, "Hello"))
    await until(lambda: here.model.waiting == 1)
    await here.model.ready(str(here.engine.path))
    assert await asked == 0
    assert "capacitor" in capsys.readouterr().out


async def test_failures_have_a_sentence_a_hint_and_a_code(rig: Rigs, capsys: pytest.CaptureFixture[str]) -> None:
    here = await rig(loading=True)
    await here.model.fail("bad_model", "pull it again")
    assert await chat(here, "Hello") in (1, 69)
    shown = capsys.readouterr().err
    assert "bad_model" in shown and "pull it again" in shown and "Traceback" not in shown

    async def dies(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(delta("half"))
        line.cut()

    assert await chat(await rig(dies), "Hello") == 1
    assert await asyncio.to_thread(main, ["chat", "--url", "http://127.0.0.1:9", "Hello"]) == 69
    assert await asyncio.to_thread(main, ["chat", "--url", f"http://127.0.0.1:{here.port}", " "]) == 64


@pytest.mark.parametrize("url", ["http://..", "http://xn--", f"http://{'a' * 300}.x", "ftp://x", "x", "http://a:b"])
def test_an_address_of_no_server_is_a_usage_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "Hello"]) == 64
    assert "not a URL" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["ключ", "\udcff", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_API_KEY", key)
    assert main(["chat", "--url", "http://127.0.0.1:9", "Hello"]) == 64


async def test_a_question_that_is_no_utf_8_is_asked(rig: Rigs) -> None:
    here = await rig(story)
    command = [sys.executable, "-m", "edge", "chat", "-m", "chat", "--url", f"http://127.0.0.1:{here.port}"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}  # strict, as in en_US.UTF-8
    for arguments, piped in (([b"caf\xe9"], b""), ([], b"caf\xe9")):
        done = await asyncio.to_thread(
            subprocess.run, [*command, *arguments], input=piped, capture_output=True, cwd=ROOT, env=env
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(here.engine.requests[-1].body)["messages"][0]["content"][:3] == "caf"


async def test_a_key_comes_from_the_environment(
    rig: Rigs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    assert main(["key", "add", "laptop", "--file", str(tmp_path / "keys.toml")]) == 0
    secret = capsys.readouterr().out.strip()
    here = await rig(story, config=GatewayOptions(keys_file=tmp_path / "keys.toml"))
    assert await chat(here, "Hello") == 69
    assert "EDGELLM_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("EDGELLM_API_KEY", secret)
    assert await chat(here, "Hello") == 0


async def test_a_certificate_that_signed_itself_is_trusted_by_name(
    rig: Rigs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    here = await rig(story, config=GatewayOptions(tls_cert=tmp_path / "both.pem", tls_key=tmp_path / "both.pem"))
    ask = ["chat", "--url", f"https://127.0.0.1:{here.port}", "Hello"]
    assert await asyncio.to_thread(main, ask) != 0
    assert "certificate" in capsys.readouterr().err
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert await asyncio.to_thread(main, ask) == 0
    assert "capacitor" in capsys.readouterr().out


def test_without_a_running_server_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Hello", "--state-dir", str(tmp_path)]) == 69
    assert "edgellm up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://0.0.0.0:8080", "http://127.0.0.1:8080"),
        ("http://[::]:1", "http://[::1]:1"),
        ("https://box:2", "https://box:2"),
    ],
)
def test_nobody_connects_to_anywhere(url: str, expected: str) -> None:
    assert reachable(url) == expected
