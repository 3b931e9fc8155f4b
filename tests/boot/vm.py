"""A virtual machine of another architecture, without hardware help: boots, answers, loses its power, answers again.

    python -m tests.boot.vm [aarch64 | x86_64]

Prints seconds from systemd's start until the socket listens and until the first token, before and after a power cut
(QMP system_reset) that also sets the clock to 1970. About six minutes; as root, on a Debian.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.boot.board import Disk, sweep, ticks
from tests.boot.vmimage import MACHINES, Machine, build, missing, rootfs

PATIENCE_S = 1200.0


class Vm:
    """A virtual machine; as a context manager it is off afterwards."""

    def __init__(self, machine: Machine, work: Path) -> None:
        self._console = work / "console"
        self._seen = 0
        self._qmp = work / "qmp"
        command = [machine.qemu, *machine.options, "-accel", "tcg,thread=multi", "-smp", "2", "-m", "2048"]
        command += ["-nodefaults", "-display", "none", "-serial", f"file:{self._console}"]
        command += ["-kernel", str(work / "vmlinuz"), "-initrd", str(work / "initrd"), "-append"]
        command += [f"console={machine.console} quiet loglevel=1 systemd.show_status=0 panic=5"]
        command += ["-drive", f"if=none,id=d,file={work / 'disk.ext4'},format=raw,cache=unsafe"]
        command += ["-device", "virtio-blk-pci,drive=d", "-qmp", f"unix:{self._qmp},server=on,wait=off"]
        self._qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        (work / "leader").write_text(f"{self._qemu.pid} {ticks(self._qemu.pid)}")  # for sweep()

    def __enter__(self) -> Vm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self._text()[-4000:])
        self._qemu.kill()
        self._qemu.wait()

    def _text(self) -> str:
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    def next(self) -> dict[str, Any]:
        """Return the guest's next record."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            lines = re.findall(r"EDGE (\{.*\})\r?\n", self._text())
            if lines[self._seen :]:
                self._seen += 1
                document: dict[str, Any] = json.loads(lines[self._seen - 1])
                assert "journal" not in document, document["journal"]
                return document
            assert self._qemu.poll() is None, "the virtual machine ended"
            time.sleep(0.2)
        raise AssertionError(f"no record of the guest within {PATIENCE_S} s")

    def cut_power(self) -> None:
        """At once: what the guest had not written is gone."""
        with socket.socket(socket.AF_UNIX) as qmp, qmp.makefile("rw") as lines:
            qmp.connect(str(self._qmp))
            lines.readline()
            for command in ("qmp_capabilities", "system_reset"):
                lines.write(json.dumps({"execute": command}))
                lines.flush()
                while "return" not in json.loads(lines.readline()):
                    pass  # an event


def boots(machine: Machine) -> list[dict[str, Any]]:
    """The records of a boot and of one after a power cut. Raises AssertionError when a promise is broken."""
    disk = Disk([rootfs(machine)])
    try:
        build(machine, disk)
        with Vm(machine, disk.work) as vm:
            installed = vm.next()
            assert installed["installed"] == ["enabled", "enabled"], installed
            records = [vm.next()]
            assert vm.next() == {"may_be_cut": True}
            vm.cut_power()
            records.append(vm.next())
    finally:
        disk.drop()
    judge(records)
    return records


def judge(records: Sequence[dict[str, Any]]) -> None:
    first, second = records
    assert first["boot_id"] != second["boot_id"]
    assert first["models"] == second["models"] != {}
    assert second["clock"] < 86400 * 2
    for record in records:
        assert (record["refused"], record["failed"], record["restarts"]) == (0, [], 0), record


def main(name: str = "aarch64") -> None:
    machine = MACHINES[name]
    if lacking := missing(machine):
        sys.exit(f"needs: apt-get install --no-install-recommends {' '.join(lacking)}")
    sweep()
    for what, record in zip(("power on", "after a power cut, clock in 1970"), boots(machine), strict=True):
        print(f"{record['machine']}, emulated, {what}: seconds since systemd's start")
        print(f"  listens {record['listens_s']}, first token of SmolLM2 {record['token_s']}")
        print(f"  {json.dumps(record)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
