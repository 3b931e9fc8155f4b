"""The launch keeps its own CPU time small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.serving import environment

PROGRAM = """
import json, os
from edge.daemon.launch import without_authorities
with without_authorities():
    import aiohttp.connector
authorities = aiohttp.connector._SSL_CONTEXT_VERIFIED.cert_store_stats()["x509_ca"]
print(json.dumps([authorities, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")]))
"""


@pytest.mark.parametrize("variables", [{}, {"SSL_CERT_FILE": "/some/ca.pem", "SSL_CERT_DIR": "/some/folder"}])
def test_no_certificate_is_read_for_a_server_of_unix_sockets(variables: dict[str, str]) -> None:
    env = environment()
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = [variables.get("SSL_CERT_FILE"), variables.get("SSL_CERT_DIR")]
    assert json.loads(done.stdout) == [0, *kept]


EXTENSIONS = """
import sys
from edge.daemon.launch import without_extensions
with without_extensions():
    import msgspec
early = "inspect" in sys.modules
import typing_extensions, msgspec, aiohttp
class Both(msgspec.Struct):
    a: "list[int] | None" = None
    b: "typing_extensions.Annotated[int, msgspec.Meta(ge=1)]" = 1
print(early, msgspec.json.decode(b'{"a": [1], "b": 2}', type=Both))
"""


def test_msgspec_is_imported_without_typing_extensions_and_works() -> None:
    done = subprocess.run([sys.executable, "-c", EXTENSIONS], env=environment(), capture_output=True, text=True)
    assert done.stdout == "False Both(a=[1], b=2)\n", done.stderr


PATHS = """
import sys
before = {"pathlib", "urllib.parse"} & set(sys.modules)
from edge import cli
cli._import_pathlib()
import edge.daemon.launch
early = not before and sys.version_info < (3, 13) and "urllib.parse" in sys.modules
from pathlib import Path
from urllib.parse import quote, urlsplit
print(early, Path("/a b").as_uri(), quote("c d"), urlsplit("http://e/f").netloc)
"""


def test_pathlib_is_imported_without_urllib_and_works() -> None:
    done = subprocess.run([sys.executable, "-c", PATHS], env=environment(), capture_output=True, text=True)
    assert done.stdout == "False file:///a%20b c%20d e\n", done.stderr
