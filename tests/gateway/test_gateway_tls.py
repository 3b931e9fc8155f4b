from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme
from msgspec.structs import replace

from edge.errors import ConfigError
from edge.gateway.config import ClientLimits, GatewayOptions
from edge.gateway.server import tls_context
from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rigs
from tests.gateway.raw import until
from tests.serving import Up, edgellm


@pytest.fixture
def authority(tmp_path: Path) -> tuple[trustme.CA, GatewayOptions]:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(cert), append=True)
    issued.private_key_pem.write_to_path(str(key))
    return authority, GatewayOptions(tls_cert=cert, tls_key=key)


async def test_tls_serves_streams_and_notices_a_client_that_leaves(
    rig: Rigs, authority: tuple[trustme.CA, GatewayOptions]
) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await line.until_gone()

    ca, config = authority
    here = await rig(script, config=config)
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    async with aiohttp.ClientSession() as client:
        answer = await client.post(f"https://localhost:{here.port}/v1/chat/completions", data=b"{}", ssl=trust)
        assert await answer.content.readany() == b"data: 1\n\n"
        async with client.get(f"https://localhost:{here.port}/api/nope", ssl=trust) as other:
            assert f"https://localhost:{here.port}/v1" in (await other.json())["error"]["hint"]
        answer.close()
        await until(lambda: here.model.open == 0)
        await until(lambda: here.engine.lines[0].gone.is_set() or here.context.stats.model("chat").gone == 1)


async def test_plain_http_on_a_tls_port_reaches_nobody(rig: Rigs, authority: tuple[trustme.CA, GatewayOptions]) -> None:
    here = await rig(config=authority[1])
    client = await here.connect()
    client.writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        assert b"HTTP/1.1 200" not in await client.rest()
    assert here.engine.requests == []


async def test_handshakes_that_do_not_end_are_counted_and_bounded(
    rig: Rigs, authority: tuple[trustme.CA, GatewayOptions]
) -> None:
    """4,000 connections without a handshake took 600 MB: they were in no count before its end."""
    ca, config = authority
    here = await rig(config=replace(config, limits=ClientLimits(connections=16, handshakes=4, grace_s=0)))
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    silent = [await here.connect() for _ in range(12)]
    await until(lambda: sum(client.reader.at_eof() for client in silent) == 8)
    assert len(here.context.connections) == 4 and [client.reader.at_eof() for client in silent[:8]] == [True] * 8
    async with aiohttp.ClientSession() as client:
        for _ in range(2):
            async with client.get(f"https://localhost:{here.port}/livez", ssl=trust) as answer:
                assert answer.status == 200
        await until(lambda: len(here.context.connections) <= 4)
        garbage = await here.connect()
        garbage.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await garbage.rest()
    await until(lambda: len(here.context.connections) == 3)  # what is no TLS ended with its handshake


async def test_a_handshake_that_the_gateway_ends_is_counted_no_longer(
    rig: Rigs, authority: tuple[trustme.CA, GatewayOptions]
) -> None:
    """Where only the places for probes are left, a connection has less time than a handshake may take."""
    limits = ClientLimits(connections=16, probe_s=0.2, grace_s=600.0)
    here = await rig(config=replace(authority[1], limits=limits))
    silent = [await here.connect() for _ in range(17)]
    await until(lambda: silent[-1].reader.at_eof())
    await until(lambda: len(here.context.connections) == 16)
    for client in silent:
        client.writer.close()
    await until(lambda: len(here.context.connections) == 0)
    assert here.context.connections._timer is None


@pytest.mark.e2e
def test_the_commands_know_that_it_is_https(
    smollm2: Path, short_dir: Path, authority: tuple[trustme.CA, GatewayOptions]
) -> None:
    ca, files = authority
    config = short_dir / "config/edgellm.toml"
    config.parent.mkdir()
    config.write_text(f'schema = 1\n[gateway]\ntls_cert = "{files.tls_cert}"\ntls_key = "{files.tls_key}"\n')
    ca.cert_pem.write_to_path(str(short_dir / "ca.pem"))
    ours = ("--state-dir", str(short_dir))
    with Up(short_dir, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=2048") as up:
        assert edgellm("wait", "--timeout", "60", *ours).returncode == 0, up.output
        assert up.status()["urls"] == [f"https://127.0.0.1:{up.port}"]
        asked = ("chat", "Say hello.", "--max-tokens", "4", *ours)
        assert "certificate" in edgellm(*asked).stderr
        done = edgellm(*asked, env={"SSL_CERT_FILE": str(short_dir / "ca.pem")})
        assert done.stdout.strip(), done.stderr
        assert done.returncode == 0 or "was cut after 4 tokens" in done.stderr


def test_files_that_cannot_be_used_are_a_configuration_error(
    tmp_path: Path, authority: tuple[trustme.CA, GatewayOptions]
) -> None:
    config = authority[1]
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    for bad in (
        GatewayOptions(tls_cert=config.tls_cert),
        GatewayOptions(tls_key=config.tls_key),
        GatewayOptions(tls_cert=broken, tls_key=config.tls_key),
        GatewayOptions(tls_cert=config.tls_cert, tls_key=tmp_path / "missing.pem"),
    ):
        with pytest.raises(ConfigError):
            tls_context(bad)
    assert tls_context(GatewayOptions()) is None


def test_no_client_renegotiates(authority: tuple[trustme.CA, GatewayOptions]) -> None:
    """Each renegotiation costs the server a signature; OpenSSL 1.1.1 of JetPack 5 allows them without end."""
    context = tls_context(authority[1])
    assert context is not None and context.options & ssl.OP_NO_RENEGOTIATION
