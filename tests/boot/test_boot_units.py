"""The unit files in real versions of systemd: verification, and the oldest version with a stub as program."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.service import units as layout
from edge.service.units import UnitSettings, drop_ins
from tests.boot import image
from tests.boot.board import Board, Disk
from tests.boot.conftest import FULL, STUBBED
from tests.boot.image import Suite

pytestmark = pytest.mark.full

# Keys that an older systemd reports as unknown and ignores; nothing depends on them.
UNKNOWN = {247: {"RestartSteps", "RestartMaxDelaySec"}, 252: {"RestartSteps", "RestartMaxDelaySec"}, 257: set()}
NASTY = UnitSettings(
    python="/opt/my edge 100% $x/bin/python",
    listen=("127.0.0.1:8081", "[::1]:8080"),
    model_dirs=("/srv/my models 100%", "/home/ann/a:b"),
    groups=("video",),
    jtop=True,
    prefetch=True,
    rpc_listen="127.0.0.1:50052",
)


@pytest.fixture(params=[*FULL, *STUBBED], ids=lambda suite: suite.name)
def suite(request: pytest.FixtureRequest, can_boot: None) -> Suite:
    found: Suite = request.param
    return found


@pytest.fixture
def disk(suite: Suite) -> Iterator[Disk]:
    one = Disk([image.rootfs(suite)])
    yield one
    one.drop()


def put(disk: Disk, settings: UnitSettings) -> None:
    for file in layout.files(settings):
        disk.write(str(file.path), file.text)


@pytest.mark.parametrize(
    "settings",
    [UnitSettings(jtop=True, prefetch=True, rpc_listen="127.0.0.1:50052"), NASTY],
    ids=["plain", "nasty-paths"],
)
def test_verify_says_nothing_but_the_listed_keys(suite: Suite, disk: Disk, settings: UnitSettings) -> None:
    put(disk, settings)
    disk.write(settings.python, "#!/bin/sh\n", 0o755)
    command = ["systemd-nspawn", "-q", "-D", str(disk.root), "--register=no", "--keep-unit", "--pipe"]
    disk.write("/opt/edgellm-control.service", "[Service]\nExecStart=/bin/true\nNoSuchKey=1\n")
    units = [str("/" / layout.UNIT_DIR / unit) for unit in layout.UNITS] + ["/opt/edgellm-control.service"]
    verify = [*command, "--private-network", "systemd-analyze", "verify", "--man=no", *units]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=120, check=False)
    ours = [line for line in done.stderr.splitlines() if "edgellm" in line]
    unknown = {line.split("'")[1] for line in ours if "Unknown " in line}
    assert unknown == UNKNOWN[suite.systemd] | {"NoSuchKey"}, "NoSuchKey proves that unknown keys are reported"
    assert [line for line in ours if "Unknown " not in line] == []


@pytest.mark.skipif(not STUBBED, reason="no suite with a stub in BOOT_SUITES: `make boot-test` has it")
def test_units_with_a_stub(suite: Suite, disk: Disk) -> None:
    """Socket, notify, watchdog, users and folders where edgellm itself needs a newer Python."""
    if suite.python is not None:
        pytest.skip("the product itself is booted here")
    put(disk, UnitSettings())
    own = "[Service]\nExecStart=\nExecStart=/usr/bin/python3 /opt/stub.py\n"
    disk.write("/etc/systemd/system/edgellm.service.d/20-stub.conf", own)
    disk.write("/opt/stub.py", Path(__file__).with_name("stub.py").read_text())
    disk.chroot("systemctl", "enable", "edgellm.socket", "edgellm.service")
    with Board(suite, disk) as board:
        board.power_on(wait=False)
        client = board.client()
        assert client.chat()[2] == 200
        board.wait_booted()
        assert board.run("systemctl", "is-system-running") == "running"
        assert board.run("stat", "-c", "%U %a", "/var/lib/edgellm", "/run/edgellm/main") == "root 755\nedgellm 750"

        killed = board.kill("KILL")
        board.until(lambda: board.main_pid() not in (0, killed), "a new process after kill -9")
        assert board.request("GET", "/")[0] == 200
        hung = board.kill("STOP")
        board.until(lambda: board.main_pid() not in (0, hung), "a new process after the watchdog")
        assert board.request("GET", "/")[0] == 200
        assert board.show("NRestarts") == "2"
        assert client.end()["refused"] == []
        board.reboot()
        assert board.request("GET", "/")[0] == 200


def test_a_path_with_spaces_percent_and_dollar_starts(suite: Suite, disk: Disk) -> None:
    """systemd itself judges the escaping: it finds the program and passes its arguments unchanged."""
    put(disk, NASTY)
    program = '#!/bin/sh\necho "$0" "$@" > /run/edgellm/said\nsystemd-notify --ready\nexec sleep inf\n'
    disk.write(NASTY.python, program, 0o755)
    assert drop_ins(NASTY)["edgellm.service"].count("%%") == 1
    notify = "[Service]\nNotifyAccess=all\n"
    disk.write("/etc/systemd/system/edgellm.service.d/20-all.conf", notify)
    disk.chroot("systemctl", "enable", "edgellm.socket", "edgellm.service")
    with Board(suite, disk) as board:
        board.power_on()
        board.until(lambda: board.show("ActiveState") == "active", "the service is up")
        assert board.run("cat", "/run/edgellm/said") == f"{NASTY.python} -I -X faulthandler -m edge up"
        assert "127.0.0.1:8081" in board.run("ss", "-ltn")
        assert "[::1]:8080" in board.run("ss", "-ltn")
