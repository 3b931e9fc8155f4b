"""`edgellm rpc`: lend this board's memory to the engine of another one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli.options import Engine, StateDir, folders_of
from edge.errors import TemporaryError, UsageError
from edge.units import parse_size, printable

if TYPE_CHECKING:
    from edge.config.devices import RpcAddress
    from edge.paths import Folders
    from edge.supervisor.rpc_server import RpcRequest


def register(root: typer.Typer) -> None:
    noun = typer.Typer(
        no_args_is_help=True, help="Lend memory to another board's model, or ask what a board lends (docs/rpc.md)."
    )
    noun.command(epilog="Example: edgellm rpc serve --listen 10.0.0.2:50052 --interface eth1")(serve)
    noun.command(epilog="Example: edgellm rpc ask 10.0.0.2:50052 --interface eth1")(ask)
    root.add_typer(noun, name="rpc")


Interface = Annotated[str, typer.Option("--interface", metavar="NAME", help="the private interface of that address")]


def serve(
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="loopback, or a private address of --interface")
    ] = "127.0.0.1:50052",
    interface: Interface = "",
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="NAME", help="CUDA0, CPU; default: the GPUs, else the CPU")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, metavar="N", help="CPU threads; 0: half of them")] = 0,
    cache: Annotated[bool, typer.Option("--cache", help="keep tensors on disk, so that a next load is faster")] = False,
    cache_limit: Annotated[
        str, typer.Option("--cache-limit", metavar="SIZE", help="most that it keeps (16GiB); 2 GiB of disk stay free")
    ] = "",
    engine: Engine = None,
    state_dir: StateDir = None,
) -> None:
    """Run llama.cpp's rpc-server and keep it running; another board names its address in a device table.

    RPC has no authentication and no encryption: an address that is neither loopback nor on a private interface that is
    named is refused.
    """
    from edge.config.devices import rpc_address
    from edge.linux.rpc import own_addresses

    address = rpc_address(listen, interface)
    if cache_limit and not cache:
        raise UsageError("--cache-limit bounds a cache that is not kept", "add --cache")
    cache_bytes = parse_size(cache_limit or "16GiB") if cache else None
    if not address.loopback and address.host not in own_addresses(interface):
        raise TemporaryError(f"{interface} has no address {address.host}", "see `ip -4 addr`; at boot it may be late")
    asyncio.run(_serve(_request(folders_of(state_dir), engine, address, tuple(device or ()), threads, cache_bytes)))


def ask(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="an rpc-server")],
    interface: Interface = "",
) -> None:
    """Ask an rpc-server for the memory of its devices. It answers while no engine uses it."""
    from edge.config.devices import rpc_address
    from edge.linux.rpc import ask_memory, connected
    from edge.plan.remotes import check_route
    from edge.units import format_bytes

    found = rpc_address(address, interface)
    if not found.loopback:
        check_route(found.host, interface)
    if connected(None, str(found)):
        raise TemporaryError(
            f"{found} serves an engine of this board", "it answers one client at a time: `edgellm plan` shows it"
        )
    for number, device in enumerate(ask_memory(found.host, found.port)):
        typer.echo(f"device {number}: {format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free")


def _request(
    folders: Folders,
    engine_id: str | None,
    address: RpcAddress,
    devices: tuple[str, ...],
    threads: int,
    cache_bytes: int | None,
) -> RpcRequest:
    """Choose the engine of this board, whose rpc-server is run. Raises EngineMissingError."""
    from edge.board.device_nodes import check_nodes
    from edge.board.probe import probe
    from edge.engine.choose import choose
    from edge.plan.argv import EnvFacts, environment
    from edge.supervisor.rpc_server import RpcRequest, program_of

    board = probe()
    engine = choose(folders, engine_id, needs_gpu=False)
    wants_gpu = engine.cuda and bool(board.gpus) and board.refused is None and not _cpu_only(devices)
    nodes = check_nodes(board) if wants_gpu else None
    facts = EnvFacts(str(folders.cache), str(folders.cache), wsl=board.container == "wsl2")
    return RpcRequest(
        program_of(engine),
        address,
        environment(engine, facts),
        devices,
        threads,
        cache_bytes,
        wants_gpu=wants_gpu,
        driver=nodes.evidence if nodes is not None and nodes.ready else None,
    )


def _cpu_only(devices: tuple[str, ...]) -> bool:
    return bool(devices) and all(name == "CPU" for name in devices)


async def _serve(request: RpcRequest) -> None:
    from edge.linux.best_effort import BestEffortWriter
    from edge.linux.sd_notify import Notifier
    from edge.resources import data_dir, load_toml
    from edge.supervisor.rpc_server import RpcServer

    notifier, out = Notifier.take(os.environ), BestEffortWriter(sys.stderr)

    def line(text: str) -> None:
        out.write(printable(text, newlines=True) + "\n")

    def say(sentence: str) -> None:
        line(sentence)
        notifier.status(printable(sentence))

    table = load_toml(data_dir("build") / "llama-server.toml")
    server = RpcServer(request, table, say, lambda text: line(f"  {text}"), notifier.ready)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # as `up`
    loop = asyncio.get_running_loop()
    # systemd's and Ctrl-C: both end the rpc-server in order, after which clients see a closed connection.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    try:
        await server.run()
    finally:
        notifier.close()
