"""Text of systemd drop-ins: what differs from machine to machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from edge.errors import UsageError
from edge.service.wish import GROUP, LISTEN, PYTHON, USER, Wish

HEAD = "# Written by `edgellm service install`. Your own changes go into another file of this folder.\n"
DROP_IN = "10-install.conf"
# ProtectHome=yes hides these; PrivateTmp=yes those of TEMPORARY.
HOMES = ("/home", "/root", "/run/user")
TEMPORARY = ("/tmp", "/var/tmp")

Sections = dict[str, list[str]]


def quoted(text: str) -> str:
    """One word of a unit file, whatever is in it: spaces, quotes, `%`. Raises UsageError.

    `$` stays: systemd replaces no variables in paths, nor in the first word of a command.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise UsageError(f"a path with control characters cannot stand in a unit: {text!r}", "rename it")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def drop_ins(wish: Wish) -> dict[str, str]:
    """Unit → text of its 10-install.conf. A unit that needs none is not there."""
    texts = {
        "edgellm.socket": render({"Socket": _listen(wish.listen)}),
        "edgellm.service": render(_service(wish)),
        "edgellm-ready.service": render({"Service": [*_command(wish, "-m edge wait"), *_user(wish)]}),
        "edgellm-jtop.service": render({"Service": _command(wish, f"-m edge.telemetry.jtop_share --listen {SHARE}")}),
        "edgellm-power.service": render(
            {
                "Service": [
                    *_command(wish, "-m edge.service.power apply"),
                    *_command(wish, "-m edge.service.power restore", key="ExecStop"),
                ]
            }
        ),
    }
    return {unit: text for unit, text in texts.items() if text}


SHARE = "/run/edgellm-jtop/share.sock"


def render(sections: Sections) -> str:
    """Empty when there is nothing to say. Every section has its header: a drop-in without one is ignored (FC-79)."""
    parts = [f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items() if lines]
    return HEAD + "\n".join(parts) if parts else ""


def _listen(addresses: Sequence[str]) -> list[str]:
    if tuple(addresses) == LISTEN:
        return []
    return ["ListenStream=", *(f"ListenStream={_endpoint(address)}" for address in addresses)]


def _endpoint(address: str) -> str:
    """systemd takes a bare port for every address; here it means loopback, as it does for `up`."""
    host, _, port = address.rpartition(":")
    return f"{host or '127.0.0.1'}:{port}"


def _service(wish: Wish) -> Sections:
    mounts = [unit for folder in wish.model_dirs for unit in mount_units(folder)]
    unit = [f"{key}={' '.join(dict.fromkeys(mounts))}" for key in ("Wants", "After") if mounts]
    lines = [*_command(wish, "-X faulthandler -m edge up"), *_user(wish)]
    if wish.groups:
        lines.append(f"SupplementaryGroups={' '.join(wish.groups)}")
    at_home = [folder for folder in wish.model_dirs if within(folder, HOMES)]
    if at_home:  # bound by root, so that closed folders above it do not matter; absent is no reason to fail
        lines += ["ProtectHome=tmpfs", *(f'BindReadOnlyPaths="-{quoted(folder)[1:]}' for folder in at_home)]
    return {"Unit": unit, "Service": lines}


def mount_units(folder: str) -> list[str]:
    """Every mount that `folder` may lie on: `/mnt/models` → mnt.mount, mnt-models.mount.

    Wanted and waited for, never required: a start that fails for want of a disk is tried again by every client behind
    the socket, 600 times a second (measured). What is not there after the mounts is the supervisor's to say.
    """
    path = PurePosixPath(folder)
    return [f"{escaped(str(part))}.mount" for part in (*reversed(path.parents), path) if str(part) != "/"]


def escaped(path: str) -> str:
    """As `systemd-escape --path` does: slashes become dashes, everything unusual `\\xNN`."""
    parts = [part for part in path.split("/") if part]
    words = ["".join(c if c.isascii() and (c.isalnum() or c in ":_.") else _hex(c) for c in part) for part in parts]
    text = "-".join(words)
    return f"\\x2e{text[1:]}" if text.startswith(".") else text


def _hex(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def _command(wish: Wish, rest: str, key: str = "ExecStart") -> list[str]:
    if wish.python == PYTHON:
        return []
    return [f"{key}=", f"{key}={quoted(wish.python)} -I {rest}"]


def _user(wish: Wish) -> list[str]:
    return [] if wish.run_as == USER else [f"User={quoted(wish.run_as)}", f"Group={GROUP}"]


def within(path: str, folders: Sequence[str]) -> bool:
    parents = {str(part) for part in (PurePosixPath(path), *PurePosixPath(path).parents)}
    return any(folder in parents for folder in folders)
