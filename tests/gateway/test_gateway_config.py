"""[gateway] of edgellm.toml, down to the gateway's own value."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.config import load
from edge.daemon.fleet import gateway_config
from edge.errors import ConfigError
from edge.gateway.config import GatewayOptions
from edge.paths import folders

ALL = """
schema = 1
[gateway]
keys_file = "/k.toml"
cors_origins = ["https://a.example"]
hosts = ["box.lan"]
max_body_bytes = "16MiB"
unknown_model = "strict"
queue = 3
tls_cert = "/c.pem"
tls_key = "/k.pem"
access_log = "json"
log_prompts = true
hold = { requests = 5, bytes = "1MiB", seconds = 7 }
"""


def settings(state: Path, text: str = "") -> GatewayOptions:
    places = folders({}, state)
    places.config.mkdir(parents=True, exist_ok=True)
    (places.config / "edgellm.toml").write_text(text)
    return gateway_config(load(places, {}, {}), places)


def test_every_key_arrives(tmp_path: Path) -> None:
    found = settings(tmp_path, ALL)
    assert found == GatewayOptions(
        keys_file=Path("/k.toml"),
        cors_origins=("https://a.example",),
        hosts=("box.lan",),
        max_body_bytes=16 * 2**20,
        hold_requests=5,
        hold_bytes=2**20,
        hold_seconds=7,
        unknown_model="strict",
        queue_requests=3,
        tls_cert=Path("/c.pem"),
        tls_key=Path("/k.pem"),
        access_log=folders({}, tmp_path).instance_run / "log" / "access.log",
        log_json=True,
        log_prompts=True,
    )


def test_the_defaults_are_the_gateways_own(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    log = places.instance_run / "log" / "access.log"
    assert settings(tmp_path) == GatewayOptions(keys_file=places.config / "keys.toml", access_log=log)
    assert settings(tmp_path, '[gateway]\naccess_log = "off"').access_log is None


@pytest.mark.parametrize("text", ['access_log = "xml"', "queue = -1", "tls_crt = 'x'", 'unknown_model = "maybe"'])
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        settings(tmp_path, f"[gateway]\n{text}\n")
