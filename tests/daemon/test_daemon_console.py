"""The lines that `up` prints about its plan."""

import io
import json

from edge.daemon.console import Console
from edge.supervisor.status import ModelStatus, State
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


def test_the_lines_that_logs_prints_are_those_of_the_console() -> None:
    """One with empty lines around it is three lines, and was printed as `\\n  http://…\\n`."""
    out = io.StringIO()
    console = Console(out)
    console.ready(ModelStatus("chat", State.READY), 1.0, ["http://127.0.0.1:8080"], "chat", keyed=False)
    assert "\n".join(console.ring.since()) + "\n" == out.getvalue()
    assert not any("\n" in line for line in console.ring.since())
