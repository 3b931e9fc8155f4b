"""The rpc-servers of a plan: ask each for its memory, and make its devices memory domains of the plan.

The last answer of each server is kept in the state folder: a server that serves an engine answers no other client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import MsgspecError, Struct, convert, to_builtins
from msgspec.structs import replace

from edge.board.device_nodes import WAIT_S
from edge.board.memory import reserve_bytes
from edge.config.devices import DeviceConfig, rpc_address
from edge.engine.engine import Engine
from edge.errors import ConfigError, EngineMissingError, RemoteMissingError
from edge.linux import rpc
from edge.linux.files import read_json, write_shared
from edge.linux.rpc import DeviceMemory
from edge.paths import Folders
from edge.plan.inputs import PlanInputs, RemoteServer

Ask = Callable[[str, int], tuple[DeviceMemory, ...]]


class Absent(Struct, frozen=True):
    """An rpc-server that does not answer and that the plan is made without."""

    endpoint: str
    because: str


class Remotes(Struct, frozen=True):
    """The rpc-servers for a plan. `memory` by endpoint, in the order of the configuration; `absent` are left out."""

    memory: dict[str, tuple[DeviceMemory, ...]] = {}
    absent: tuple[Absent, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_notes(self) -> tuple[str, ...]:
        left_out = (f"planned without the rpc-server at {each.endpoint}: {each.because}" for each in self.absent)
        return (*self.notes, *left_out)


def find_remotes(
    devices: Sequence[DeviceConfig], engine: Engine, folders: Folders, *, here: bool, wait: bool, ask: Ask | None = None
) -> Remotes:
    """Ask every rpc-server of `[[device]]`.

    `here` False plans for another machine: nothing is asked, and stated memory counts. `wait` False leaves out what
    does not answer. Raises EngineMissingError for an engine without RPC, ConfigError for an address that may not be
    used, RemoteMissingError where one does not answer and is to be waited for.
    """
    if not devices:
        return Remotes()
    check_engine(engine)
    kept = folders.state / "remotes.json"
    known = _read(kept)
    memory: dict[str, tuple[DeviceMemory, ...]] = {}
    answers: dict[str, tuple[DeviceMemory, ...]] = {}  # as they came, before stated memory replaces them
    absent: list[Absent] = []
    notes: list[str] = []
    for device in devices:
        if not here:
            if device.memory:
                memory[device.rpc] = (DeviceMemory(device.memory, device.memory),)
            notes.append(f"the rpc-server at {device.rpc} was not asked: planned {_as_stated(device)}")
            continue
        try:
            answer = ask_device(device, ask or rpc.ask_memory)
            answers[device.rpc] = answer
        except RemoteMissingError as error:
            if error.busy and device.rpc in known:
                memory[device.rpc] = usable_memory(device, known[device.rpc])
                notes.append(f"the rpc-server at {device.rpc} serves an engine: planned with its last answer")
            elif device.absent == "without" or not wait:
                absent.append(Absent(device.rpc, str(error)))
            else:
                raise RemoteMissingError(str(error), error.hint, patience_s=WAIT_S, busy=error.busy) from error
            continue
        memory[device.rpc] = usable_memory(device, answer)
    if any(known.get(endpoint) != answer for endpoint, answer in answers.items()):
        _write(kept, {**known, **answers})
    return Remotes(memory, tuple(absent), tuple(notes))


def check_engine(engine: Engine) -> None:
    """Raise EngineMissingError unless the engine was built with llama.cpp's RPC backend."""
    if engine.rpc:
        return
    if engine.kind == "embedded":
        message = "[[device]] needs an engine with llama.cpp's RPC backend, and the embedded engine has none"
    else:
        message = f"[[device]] needs an engine with llama.cpp's RPC backend, and {engine.id} was built without it"
    raise EngineMissingError(message, "build one on each board: `edgellm build --rpc`")


def _as_stated(device: DeviceConfig) -> str:
    return "with the memory that is stated" if device.memory else "without it, because no memory is stated"


def ask_device(device: DeviceConfig, ask: Ask = rpc.ask_memory) -> tuple[DeviceMemory, ...]:
    """Ask one server for the memory of its devices. Blocking.

    Raises RemoteMissingError, `busy` where it serves an engine, and ConfigError for a way that is not its interface's.
    """
    address = rpc_address(device.rpc, device.interface)
    if not address.loopback:
        check_route(address.host, device.interface)
    if rpc.connected(None, device.rpc):
        # Not asked: a connection that waits behind the engine's own tells the other board that the engine is gone.
        raise RemoteMissingError(f"the rpc-server at {device.rpc} serves an engine of this board", busy=True)
    return ask(address.host, address.port)


def usable_memory(device: DeviceConfig, found: tuple[DeviceMemory, ...]) -> tuple[DeviceMemory, ...]:
    """Return the memory that layers may take. Raises ConfigError for a CPU without stated memory."""
    if device.memory:
        return _stated(found, device.memory)
    if any(each.free_bytes == each.total_bytes for each in found):
        hint = 'state what layers may take there: memory = "6GiB" in its [[device]]'
        raise ConfigError(f"the rpc-server at {device.rpc} computes on a CPU, which does not tell what is free", hint)
    return found


def _stated(found: Sequence[DeviceMemory], memory_bytes: int) -> tuple[DeviceMemory, ...]:
    """Divide stated memory over the devices of a server by their size."""
    total = sum(each.total_bytes for each in found) or 1
    shares = (memory_bytes * each.total_bytes // total for each in found)
    return tuple(DeviceMemory(share, share) for share in shares)


def check_route(host: str, interface: str) -> None:
    """Raise ConfigError unless the kernel reaches `host` from an address of this interface."""
    own = rpc.own_addresses(interface)
    if not own:
        raise ConfigError(f"the interface {interface} has no IPv4 address", "see `ip -4 addr`")
    # By the routing table: a host route or a VPN may lead elsewhere than the name suggests.
    source = rpc.address_towards(host)
    if source not in own:
        hint = "RPC has no authentication, so it uses no other way: see `ip route get`"
        raise ConfigError(f"{host} is not reached over {interface}, but from {source or 'nowhere'}", hint)


def with_remotes(inputs: PlanInputs, remotes: Remotes, reserve: str) -> PlanInputs:
    """Return the inputs with a memory domain for each remote device. Pure.

    A domain has the name of llama.cpp's buffers there, `RPC0[10.0.0.2:50052]`: numbered over all servers in their order
    (ggml_backend_rpc_add_server). Stated memory has no reserve: an operator has chosen it.
    """
    available, reserved = dict(inputs.available_bytes), dict(inputs.reserve_bytes)
    servers: list[RemoteServer] = []
    number = 0
    for endpoint, devices in remotes.memory.items():
        names = []
        for device in devices:
            name = f"RPC{number}[{endpoint}]"
            number += 1
            names.append(name)
            available[name] = device.free_bytes
            stated = device.free_bytes == device.total_bytes
            reserved[name] = 0 if stated else reserve_bytes(reserve, device.total_bytes)
        servers.append(RemoteServer(endpoint, tuple(names)))
    return replace(inputs, available_bytes=available, reserve_bytes=reserved, remotes=tuple(servers))


def _read(path: Path) -> dict[str, tuple[DeviceMemory, ...]]:
    try:
        return convert(read_json(path), dict[str, tuple[DeviceMemory, ...]])
    except (OSError, ValueError, MsgspecError):
        return {}


def _write(path: Path, known: dict[str, tuple[DeviceMemory, ...]]) -> None:
    with suppress(OSError):  # a state folder of another user: only the answer of a busy server is lost
        write_shared(path, json.dumps(to_builtins(known), indent=1) + "\n")
