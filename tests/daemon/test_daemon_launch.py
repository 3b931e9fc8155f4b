"""The launch keeps its own CPU time small."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.serving import environment

CLIENT = """
import json, sys
from edge.daemon.launch import without_client
without_client()
import edge.daemon.app
import ssl
early = [name for name in ("aiohttp.client", "aiohttp.connector", "aiohttp.cookiejar") if name in sys.modules]
import aiohttp
print(json.dumps([early, aiohttp.ClientSession.__name__, aiohttp.client.__name__, bool(aiohttp.__version__)]))
"""


def test_the_server_is_imported_without_the_client_and_a_name_of_the_client_gets_it() -> None:
    """Its connector reads the certificate authorities of the system: 45 ms for a server of unix sockets."""
    done = subprocess.run([sys.executable, "-c", CLIENT], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], "ClientSession", "aiohttp.client", True]


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
