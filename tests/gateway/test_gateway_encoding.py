"""Compressed request bodies (Codex sends zstd): the engine gets plain bytes, limits hold for what they unpack to."""

from __future__ import annotations

import gzip
import json
import random
import resource
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from edge.gateway.body import Body, _decoder
from edge.gateway.config import ClientLimits, GatewayOptions
from edge.gateway.openai import RejectedError
from edge.units import MIB
from tests.fakes.upstream.engine import answer_ok
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rigs

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi " * 2000}]}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKED = {
    "zstd": zstd.compress,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    " GZIP": lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:]),
    "zstd ": lambda data: zstd.compress(data[:5]) + zstd.compress(data[5:]),
}


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("models", [1, 2])
async def test_a_compressed_request_is_decoded(rig: Rigs, encoding: str, models: int) -> None:
    here = await rig()
    if models == 2:
        here.context.upstreams = {"chat": here.model, "other": FakeModel("other")}
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", PACKED[encoding](TEXT), f"Content-Encoding: {encoding}")
    assert (await client.answer()).status == 200
    seen = here.engine.requests[0]
    assert seen.body == TEXT
    assert (seen.header("content-encoding"), seen.header("content-length")) == (None, str(len(TEXT)))


async def test_a_large_compressed_body_is_streamed(rig: Rigs) -> None:
    here = await rig()
    data = random.Random(1).randbytes(3 * MIB)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", zstd.compress(data), "Content-Encoding: zstd")
    assert (await client.answer()).status == 200
    assert here.engine.requests[0].body == data


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
async def test_a_bomb_is_refused_within_the_limits_memory(rig: Rigs, encoding: str) -> None:
    piece = b"\0" * MIB
    packer = zstd.ZstdCompressor() if encoding == "zstd" else zlib.compressobj(wbits=31)
    size = 1024 if encoding == "zstd" else 256  # pieces: gzip takes 3 s of CPU time to pack 1 GiB
    bomb = b"".join([*(packer.compress(piece) for _ in range(size)), packer.flush()])
    here = await rig(config=GatewayOptions(max_body_bytes=8 * MIB))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", bomb, f"Content-Encoding: {encoding}")
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (413, "body_too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 40 * 1024


@pytest.mark.parametrize(
    ("encoding", "body", "status", "kind"),
    [
        ("br", b"x", 415, "unsupported_encoding"),
        ("gzip, zstd", b"x", 415, "unsupported_encoding"),
        ("zstd", b"not zstd", 400, "bad_encoding"),
        ("gzip", gzip.compress(TEXT)[:-20], 400, "bad_encoding"),
        ("zstd", zstd.compress(TEXT)[:-5], 400, "bad_encoding"),
        ("deflate", zlib.compress(TEXT) + b"trailing", 400, "bad_encoding"),
        # Frames without content cost 10 µs each: 8 MB of them took 12 s.
        ("zstd", b"\x50\x2a\x4d\x18\x00\x00\x00\x00" * 5000, 400, "bad_encoding"),
        ("gzip", gzip.compress(b"") * 5000, 400, "bad_encoding"),
        (
            "zstd",
            zstd.compress(b"\0" * 64, options={zstd.CompressionParameter.checksum_flag: 1})[:-1],
            400,
            "bad_encoding",
        ),
    ],
)
async def test_what_cannot_be_decoded_is_an_answer_with_a_kind(
    rig: Rigs, encoding: str, body: bytes, status: int, kind: str
) -> None:
    here = await rig()
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", body, f"Content-Encoding: {encoding}")
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (status, kind)
    assert here.engine.requests == []


async def test_an_empty_body_needs_no_decoder(rig: Rigs) -> None:
    here = await rig(answer_ok, config=GatewayOptions(limits=ClientLimits(replay_bytes=10)))
    client = await here.connect()
    for _ in range(2):
        await client.request("POST", "/v1/chat/completions", b"", "Content-Encoding: zstd")
        assert (await client.answer()).status == 200


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "zstd"]), st.integers(1, 50))
def test_any_bytes_are_decoded_or_refused(data: bytes, encoding: str, cut: int) -> None:
    for body in (data, PACKED[encoding](data)):
        decoder, found = _decoder(encoding), b""
        assert decoder is not None
        try:
            for start in range(0, len(body), cut):
                found += decoder.feed(body[start : start + cut])
            while part := decoder.more():
                found += part
            decoder.finish()
        except RejectedError as refused:
            assert body is data
            assert refused.fault.status == 400
        else:
            assert body is data or found == data


def test_two_lines_of_content_encoding_are_one_list() -> None:
    class Request:
        headers = CIMultiDict([("Content-Encoding", "identity"), ("Content-Encoding", "gzip")])
        can_read_body, content_length, transport = False, None, None

    class Connections:
        def uploading(self, *_: object) -> None: ...

    with pytest.raises(RejectedError):
        Body(Request(), GatewayOptions(), Connections())
