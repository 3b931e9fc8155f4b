"""The lines that `up` prints about its plan."""

import io
import json

from edge.daemon.console import Console
from tests.plan.golden import ERAS, planned


def said(board: str, *, as_json: bool = False) -> str:
    out = io.StringIO()
    Console(out, as_json=as_json).planned(planned(board, ERAS[0]), "jetson", ["http://127.0.0.1:8080"])
    return out.getvalue()


def test_fc44_the_start_names_the_power_mode() -> None:
    """FC-44: in the first line, and in the event; absent where the board has none."""
    mode = planned("orin-nano-8", ERAS[0]).board.power_mode
    assert mode is not None
    assert f" · power mode {mode.name} · profile jetson · " in said("orin-nano-8").splitlines()[0]
    assert json.loads(said("orin-nano-8", as_json=True))["power_mode"] == mode.name
    assert "power mode" not in said("x86-vm")
    assert json.loads(said("x86-vm", as_json=True))["power_mode"] is None
