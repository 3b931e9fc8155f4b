"""Run inside a virtual machine from early boot on and print JSON on its console. First boot: install edgellm.

EDGE {"installed": …}                                then it boots again
EDGE {"boot_id": …, "accepted_s": …, "token_s": …}   of every later boot; seconds since systemd's start
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from prober import Watch  # type: ignore[import-not-found]  # beside this file in the machine, and not on a path here

PYTHON = "/opt/edgellm/bin/python"
MEASURED = Path("/opt/vm/measured")  # from then on the clock starts in 1970


def report(document: dict[str, Any]) -> None:
    console = os.open("/dev/console", os.O_WRONLY | os.O_NOCTTY)
    os.write(console, f"\nEDGE {json.dumps(document)}\n".encode())
    os.close(console)


def said(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout.strip()


def install() -> None:
    said("systemctl", "is-system-running", "--wait")
    command = (PYTHON, "-I", "-m", "edge", "service", "install", "--offline", "/opt/offline", "-p", "cpu")
    text = said(*command)
    report(
        {"installed": said("systemctl", "is-enabled", "edgellm.socket", "edgellm.service").split(), "said": text[-900:]}
    )
    os.sync()
    said("systemctl", "reboot")


def stamp_s(key: str, *unit: str) -> float:
    return int(said("systemctl", "show", *unit, "-p", key, "--value")) / 1e6


def measure() -> None:
    # A minute passes here until the gateway accepts what systemd's socket took: with more connections than the gateway
    # allows among them it would end the oldest, which is the chat's.
    watch = Watch(8080, pause_s=1.0)
    for work in (watch.connect, watch.chat):
        threading.Thread(target=work, daemon=True).start()
    while not any(chat[2] == 200 for chat in watch.chats):
        time.sleep(0.2)
    watch.over = True
    failed = [f"{ended - began:.1f} s: {status}" for began, ended, status in watch.chats if status != 200]
    if failed:
        report({"journal": said("journalctl", "-u", "edgellm", "-b", "-o", "short-monotonic")[-3000:]})
    token_s = next(chat[1] for chat in watch.chats if chat[2] == 200)
    began_s = stamp_s("UserspaceTimestampMonotonic")
    models = sorted(Path("/var/lib/edgellm/models").glob("*/*.gguf"))
    report(
        {
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "kernel_s": round(began_s, 2),
            "listens_s": round(stamp_s("ActiveEnterTimestampMonotonic", "edgellm.socket") - began_s, 2),
            "asked_s": round(watch.accepted_s - began_s, 2),  # Python itself takes long to start here
            "token_s": round(token_s - began_s, 2),
            "refused_before": watch.refused_before,
            "refused": len(watch.refused),
            "failed": failed,
            "restarts": int(said("systemctl", "show", "edgellm.service", "-p", "NRestarts", "--value")),
            "clock": int(time.time()),
            "machine": os.uname().machine,
            "models": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in models},
        }
    )
    with MEASURED.open("w") as file:
        os.fsync(file.fileno())
    os.sync()
    report({"may_be_cut": True})


if Path("/etc/systemd/system/edgellm.service").exists():
    measure()
else:
    install()
