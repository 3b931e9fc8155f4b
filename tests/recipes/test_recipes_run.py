"""The recipes with the real programs: nginx, Prometheus and HAProxy from Debian, LangChain from PyPI."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import jsonschema
import pytest
import trustme
import yaml

from edge.gateway import keys
from edge.gateway.config import GatewayOptions
from edge.supervisor.status import ModelStatus, State
from tests.clients.test_real_clients import HERE as CLIENTS
from tests.clients.test_real_clients import environment
from tests.fakes.upstream.engine import Line, Received
from tests.fakes.upstream.model import FakeModel
from tests.fakes.upstream.real import real_engine
from tests.gateway.conftest import Rigs, rig, sockets
from tests.gateway.raw import until
from tests.kept import kept
from tests.recipes.debian import installed_on_ubuntu, program
from tests.recipes.test_recipes_files import RECIPES, ROOT, event, exported, expressions, load
from tests.serving import PATIENCE_S, Up, eventually, free_port

__all__ = ["rig", "sockets"]  # fixtures
pytestmark = pytest.mark.full
HERE = Path(__file__).parent
CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def running(command: list[str], log: Path, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def listening(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    def accepts() -> bool:
        assert child.poll() is None, log.read_text(errors="replace")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
        return False

    await asyncio.to_thread(eventually, accepts, lambda: log.read_text(errors="replace"))


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S))


async def output(command: list[str], given: str = "") -> str:
    """Return both outputs of a command that succeeds."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = await asyncio.create_subprocess_exec(*command, **pipes)  # type: ignore[arg-type]
    out, _ = await asyncio.wait_for(child.communicate(given.encode()), PATIENCE_S)
    assert child.returncode == 0, out.decode()
    return out.decode()


# -- nginx ---------------------------------------------------------------------------------------------------------

NGINX = """daemon off; worker_processes 1; error_log stderr; pid {folder}/nginx.pid; {user}
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/edgellm.conf;
}}
"""


@contextlib.asynccontextmanager
async def nginx(cache: Path, folder: Path, upstream: int) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """The recipe, with a port, a certificate and an upstream of this test."""
    command, port = program(cache, "nginx", "nginx"), free_port()
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "box.example.org")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(folder / "cert.pem"), append=True)
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    text = (RECIPES / "nginx.conf").read_text()
    for old, new in (
        ("127.0.0.1:8080", f"127.0.0.1:{upstream}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/edgellm/", f"{folder}/"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "edgellm.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, user=user))
    command += ["-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    assert "warn" not in await output([*command, "-t"])
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with running(command, folder / "nginx.log", folder) as child:
        await listening(port, child, folder / "nginx.log")
        yield f"https://localhost:{port}", trust


async def test_nginx_passes_each_token_when_it_comes_and_a_client_that_leaves(
    rig: Rigs, test_cache: Path, tmp_path: Path
) -> None:
    go_on = asyncio.Event()

    async def script(line: Line, request: Received) -> None:
        if len(request.body) > 100:
            await line.json({"bytes": len(request.body)})
            return
        await line.stream()
        await line.chunk(event("one"))
        await go_on.wait()
        await line.chunk(event("two"))
        await line.until_gone()

    secret = keys.new_secret()
    keys.write(tmp_path / "keys.toml", [keys.make("proxy", secret, admin=True, created="", others=())])
    here = await rig(script, config=GatewayOptions(keys_file=tmp_path / "keys.toml"))
    bearer = {"Authorization": f"Bearer {secret}", "Host": "box.example.org"}
    async with nginx(test_cache, tmp_path, here.port) as (url, trust), session() as client:
        answer = await client.post(url + CHAT, data=b"{}", headers=bearer, ssl=trust)
        assert await answer.content.readany() == event("one")  # the second does not exist yet
        go_on.set()
        assert await answer.content.readany() == event("two")
        # As curl and browsers leave; asyncio would wait 30 s for nginx's own end of TLS.
        assert answer.connection is not None and answer.connection.transport is not None
        answer.connection.transport.abort()
        await until(lambda: here.model.open == 0)
        assert here.context.stats.model("chat").gone == 1
        big = b"{}" + b" " * (3 << 20)
        async with client.post(url + CHAT, data=io.BytesIO(big), headers=bearer, ssl=trust) as other:
            assert (await other.json())["bytes"] == len(big)
        async with client.post(url + CHAT, data=b"{}", ssl=trust) as other:
            assert other.status == 401
        for path, status in (("/metrics", 403), ("/admin/models/chat/unload", 403), ("/readyz", 200), ("/livez", 200)):
            async with client.get(url + path, headers=bearer, ssl=trust) as other:
                assert other.status == status, path


async def test_nginx_in_front_of_a_server_without_keys_lets_no_foreign_name_in(
    rig: Rigs, test_cache: Path, tmp_path: Path
) -> None:
    here = await rig()
    async with nginx(test_cache, tmp_path, here.port) as (url, trust), session() as client:
        named = {"Host": "box.example.org"}
        async with client.post(url + CHAT, data=b"{}", headers=named, ssl=trust) as answer:
            assert (answer.status, (await answer.json())["error"]["kind"]) == (403, "host_not_allowed")
    assert here.engine.requests == []


# -- Prometheus ----------------------------------------------------------------------------------------------------


def prometheus_folder(folder: Path, port: int, key: str) -> Path:
    text = (RECIPES / "prometheus.yml").read_text()
    for old, new in (
        ("box:8080", f"127.0.0.1:{port}"),
        ("/etc/prometheus/edgellm.key", f"{folder}/edgellm.key"),
        ("scrape_interval: 15s", "scrape_interval: 1s\n  evaluation_interval: 1s"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text)
    (folder / "alerts.yml").write_text((RECIPES / "alerts.yml").read_text())
    (folder / "edgellm.key").write_text(key)
    return folder / "prometheus.yml"


def plain(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace('instance=~"$instance"', 'instance=~".*"')


async def test_prometheus_scrapes_a_board_and_answers_every_query(rig: Rigs, test_cache: Path, tmp_path: Path) -> None:
    here, text = await exported(rig)
    tool = program(test_cache, "promtool", "prometheus")
    config = prometheus_folder(tmp_path, here.port, "unused")
    assert "SUCCESS" in await output([*tool, "check", "config", str(config)])
    await output([*tool, "check", "metrics"], text)
    port = free_port()
    command = [
        *program(test_cache, "prometheus", "prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    queries = {place: plain(query) for place, query in expressions().items() if "label_values" not in query and query}
    log = tmp_path / "prometheus.log"
    with running(command, log, tmp_path) as child:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            await listening(port, child, log)

            async def ask(query: str) -> list[Any]:
                answer = await client.get("/api/v1/query", params={"query": query})
                document = answer.json()
                assert document["status"] == "success", (query, document)
                found: list[Any] = document["data"]["result"]
                return found

            async def wait_until(look: Callable[[], Awaitable[bool]]) -> None:
                for _ in range(5 * PATIENCE_S):
                    assert child.poll() is None, log.read_text()
                    if await look():
                        return
                    await asyncio.sleep(0.2)
                raise AssertionError(log.read_text())

            async def ready() -> bool:
                return (await client.get("/-/ready")).status_code == 200

            async def scraped() -> bool:
                found = await ask('count_over_time(up{job="edgellm"}[1m])')
                return bool(found) and float(found[0]["value"][1]) >= 3

            async def alarmed() -> bool:
                return bool(await ask(queries["alerts: EdgellmModelFailed"]))

            await wait_until(ready)
            await wait_until(scraped)
            (up,) = await ask('up{job="edgellm"}')
            assert up["value"][1] == "1"
            # A panel always has a line, an alert has none while all is well; the disk is this machine's.
            assert [place for place, query in queries.items() if place[0] == "d" and not await ask(query)] == []
            alerts = [place for place in queries if place[0] == "a" and "Disk" not in place]
            assert [place for place in alerts if await ask(queries[place])] == []
            here.model.state = ModelStatus("chat", State.FAILED)
            await wait_until(alarmed)


# -- LangChain -----------------------------------------------------------------------------------------------------


async def test_the_langchain_recipe_prints_an_answer_and_a_class(
    rig: Rigs, smollm2: Path, test_cache: Path, sockets: Path
) -> None:
    python = await asyncio.to_thread(environment, test_cache, CLIENTS / "requirements.txt")
    with real_engine(smollm2, sockets / "chat.sock", model_alias=["chat"]):
        here = await rig(models={"chat": FakeModel("chat", str(sockets / "chat.sock"))})
        variables = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        child = await asyncio.create_subprocess_exec(
            python,
            RECIPES / "langchain_chat.py",
            env=variables | {"EDGELLM_URL": f"http://127.0.0.1:{here.port}/v1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, complaints = await asyncio.wait_for(child.communicate(), 300)
    assert child.returncode == 0, complaints.decode()[-2000:]
    text, _, shape = out.decode().strip().rpartition("\n")
    assert text and shape.startswith("name=") and "country=" in shape


# -- HAProxy -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def haproxy(cache: Path, folder: Path, boards: list[int]) -> Iterator[str]:
    command, port = program(cache, "haproxy", "haproxy"), free_port()
    text = (RECIPES / "haproxy.cfg").read_text()
    replaced = [("bind :8000", f"bind 127.0.0.1:{port}")]
    replaced += [(f"192.168.1.2{number}:8080", f"127.0.0.1:{board}") for number, board in enumerate(boards, 1)]
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    (folder / "haproxy.cfg").write_text(text)
    checked = subprocess.run(
        [*command, "-c", "-f", str(folder / "haproxy.cfg")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "WARNING" not in checked.stdout + checked.stderr
    log = folder / "haproxy.log"
    with running([*command, "-db", "-f", str(folder / "haproxy.cfg")], log, folder) as child:

        def ready() -> bool:
            assert child.poll() is None, log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
            return False

        eventually(ready, lambda: log.read_text())
        yield f"http://127.0.0.1:{port}"


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "temperature": 0}
    return client.post(CHAT, json=body | more)


@pytest.mark.e2e
def test_haproxy_serves_from_the_other_board_when_one_is_killed_in_mid_stream(
    smollm2: Path, test_cache: Path, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        arguments = ("-p", "cpu", "-m", f"chat={smollm2}")
        boards = {
            f"board{number}": stack.enter_context(Up(tmp_path / f"board{number}", *arguments)) for number in (1, 2)
        }
        for board in boards.values():
            board.wait_for("ok", "degraded")
        url = stack.enter_context(haproxy(test_cache, tmp_path, [board.port for board in boards.values()]))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False))
        long = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        body = {"messages": [{"role": "user", "content": "Tell a story."}], **long}

        with client.stream("POST", CHAT, json=body) as stream:
            pieces = stream.iter_raw()
            assert b"data: " in next(pieces)  # token by token: 3000 of them take minutes
            victim = stream.headers["Edgellm-Board"]
            (other,) = set(boards) - {victim}
            # Least connections: the board that streams is not the one that is asked.
            assert {ask(client).headers["Edgellm-Board"] for _ in range(3)} == {other}
            boards[victim].process.kill()
            boards[victim].process.wait()
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in pieces:
                    pass
        # From the first request on, before the health check has noticed.
        answers = [ask(client) for _ in range(6)]
        assert [(each.status_code, each.headers["Edgellm-Board"]) for each in answers] == [(200, other)] * 6
        assert client.get("/readyz").status_code == 200

        # A new process on the same address is taken in again.
        again = Up(tmp_path / victim, *arguments, port=boards[victim].port)
        stack.enter_context(again).wait_for("ok", "degraded")

        def both() -> bool:
            with client.stream("POST", CHAT, json=body) as stream:
                next(stream.iter_raw())
                first = stream.headers["Edgellm-Board"]
                return first != ask(client).headers["Edgellm-Board"]

        eventually(both, "one board only")
        conversation = {"X-Conversation-Id": "one"}
        hello = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        seen = {client.post(CHAT, json=hello, headers=conversation).headers["Edgellm-Board"] for _ in range(4)}
        assert len(seen) == 1


# -- Kubernetes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.28", "1.34"])
async def test_the_manifests_pass_kubernetes_own_schemas(test_cache: Path, tmp_path: Path, version: str) -> None:
    """Strict: an unknown key is an error. 1.28 is of 2023; k3s on a board that nothing updates."""
    python = await asyncio.to_thread(environment, test_cache, HERE / "requirements-kubernetes.txt")
    command = [str(python.parent / "kubernetes-validate"), "--strict", "--kubernetes-version", version]
    page = (ROOT / "docs" / "several-boards.md").read_text(encoding="utf-8")
    files = [RECIPES / "kubernetes.yaml"]
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)):
        files.append(tmp_path / f"block{number}.yaml")
        files[-1].write_text(block)
    shown = await output([*command, *map(str, files)])
    assert shown.count("passed") == len(list(yaml.safe_load_all(files[0].read_text()))) + len(files) - 1
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(files[0].read_text().replace("readinessProbe", "readynessProbe"))
    with pytest.raises(AssertionError, match="readynessProbe"):
        await output([*command, str(wrong)])


@pytest.mark.parametrize(("suite", "python"), [("jammy", "3.10"), ("noble", "3.12")])
def test_the_image_installs_what_the_ubuntu_of_jetpack_has(test_cache: Path, suite: str, python: str) -> None:
    """JetPack 6 is Ubuntu 22.04, JetPack 7 is 24.04: what can be checked of an image without NVIDIA's base."""
    stages = re.findall(r"apt-get install (.*?)\\\n    &&", (ROOT / "build/Containerfile").read_text(), re.DOTALL)
    assert len(stages) == 2
    for stage in stages:
        packages = [word for word in stage.replace("\\\n", " ").split() if not word.startswith("-")]
        found = installed_on_ubuntu(test_cache / "ubuntu", suite, packages)
        assert set(packages) <= set(found)
        assert found["python3"].startswith(python)


# -- Docker Compose ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose.yml", "compose.nvidia.yml"])
def test_compose_files_pass_the_schema_of_the_compose_specification(
    test_cache: Path, tmp_path: Path, name: str
) -> None:
    """The schema is a file in docker-compose 1.29.2 from PyPI, the last release in Python."""

    def make(wheels: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "docker-compose==1.29.2", "-d", str(wheels)]
        subprocess.run(pip, check=True)

    (wheel,) = kept(test_cache / "compose", make).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        schema = json.loads(archive.read("compose/config/compose_spec.json"))
    validator = jsonschema.Draft201909Validator(schema)
    document = load(name)
    document.pop("name", None)  # the specification has it since 2022
    validator.validate(document)
    document["services"]["edgellm"]["enviroment"] = {}
    with pytest.raises(jsonschema.ValidationError, match="enviroment"):
        validator.validate(document)
