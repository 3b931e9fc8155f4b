"""The fake llama-server's process: HTTP on a unix socket or a port, lines like the real one's, and faults on command.

llama_switches.py says what can be switched and makes the executable. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engine_log
from llama_switches import PROGRESS_MARK, Switches, help_text, read_switches


class Engine:
    def __init__(self, folder: Path, switches: Switches, options: dict[str, str]) -> None:
        self.folder, self.switches, self.options = folder, switches, options
        self.ready_s: float | None = None
        self.completions = 0
        self.busy_since_s: float | None = None
        self.lock = threading.Lock()
        self.held = b"x" * (switches.hold_mib << 20)
        self.clock = engine_log.Clock()
        self.start = engine_log.Start(
            era=switches.log_era,
            gpu=switches.gpu,
            layers=switches.layers,
            offloaded=switches.offloaded,
            kv_mib=switches.kv_mib,
            n_ctx=int(options.get("--ctx-size", "2048")),
            n_slots=int(options.get("--parallel", "1")),
        )

    def say(self, text: str) -> None:
        if self.switches.log_era == "silent":
            return
        print(self.clock.stamp(text) if self.switches.log_era == "new" else text, file=sys.stderr, flush=True)
        time.sleep(self.switches.line_pause_s)

    def progress(self, value: float, state: str = "loading") -> None:
        if self.switches.protocol and os.environ.get("LLAMA_SERVER_ROUTER_PORT"):
            payload = {"stages": ["text_model"], "current": "text_model", "value": value} if state == "loading" else {}
            print(PROGRESS_MARK + ":" + json.dumps({"state": state, "payload": payload}), flush=True)

    def die_if(self, at: str) -> None:
        death = self.switches.death
        if death is None or death.at != at or (death.unless and death.unless in " ".join(sys.argv)):
            return
        for line in death.lines:
            print(line, file=sys.stderr, flush=True)
        if death.signal is not None:
            os.kill(os.getpid(), death.signal)
            time.sleep(60)
        os._exit(death.code or 0)

    def load(self) -> None:
        """In the order of the real one; then it calls itself ready."""
        self.die_if("line")
        while self.switches.silent_until and not Path(self.switches.silent_until).exists():
            time.sleep(0.01)
        for line in self.switches.stray:
            print(line, file=sys.stderr, flush=True)
        silent = self.switches.log_era == "silent"
        for line in () if silent else engine_log.before_load(self.start):
            self.say(line)
        for line in () if silent else engine_log.tensors(self.start):
            self.say(line)
        for _ in range(self.switches.dots):
            print(".", end="", file=sys.stderr, flush=True)
            time.sleep(0.1)
        self.die_if("loading")
        for step in range(self.switches.steps):
            value = (step + 1) / self.switches.steps
            if self.switches.stall_at is not None and value > self.switches.stall_at:
                threading.Event().wait()
            time.sleep(self.switches.load_s / self.switches.steps)
            self.progress(value)
        for line in () if silent else engine_log.after_load(self.start):
            self.say(line)
        self.die_if("ready")
        if self.switches.health_never:
            return
        if not self.switches.ignore_term:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        self.ready_s = time.monotonic()
        self.progress(1.0, "ready")

    @property
    def completes(self) -> bool:
        when = self.switches.completions_when
        return self.ready_s is not None and (not when or Path(when).exists())

    def count(self) -> int:
        """The number of this completion. Hangs without end when wedged."""
        with self.lock:
            self.completions += 1
            number = self.completions
        if self.switches.wedge_after is not None and number > self.switches.wedge_after:
            threading.Event().wait()
        death = self.switches.death
        if death is not None and death.at == "request" and number == death.request and death.chunk == 0:
            self.die_if("request")
        if number > 1 and self.switches.slow_s:
            self.busy_since_s = time.monotonic()
            time.sleep(self.switches.slow_s)
            self.busy_since_s = None
        return number

    def slots(self) -> list[dict[str, Any]]:
        since_s = self.busy_since_s
        decoded = int((time.monotonic() - since_s) * 10) if since_s is not None and self.switches.decodes else 0
        return [{"id": 0, "is_processing": since_s is not None, "next_token": [{"n_decoded": decoded}]}]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        if self.engine.switches.chatter:
            self.engine.say(f"srv  log_server_r: request: {self.command} {self.path} 127.0.0.1 200")

    def do_GET(self) -> None:
        engine = self.engine
        models = {"object": "list", "data": [{"id": "fake", "object": "model"}]}
        if self.path == "/v1/models" and engine.switches.models_at_once:
            return self.answer(200, models)
        if engine.ready_s is None:
            return self.loading()
        if self.path == "/props":
            start, switches = engine.start, engine.switches
            n_ctx = switches.props_n_ctx or start.n_ctx // start.n_slots
            slots = switches.props_slots or start.n_slots
            return self.answer(200, {"total_slots": slots, "default_generation_settings": {"n_ctx": n_ctx}})
        if self.path == "/slots" and engine.switches.slots_hang:
            threading.Event().wait()
        known = {"/health": {"status": "ok"}, "/v1/models": models, "/slots": engine.slots()}
        return self.answer(200 if self.path in known else 404, known.get(self.path, {"error": "not found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        engine = self.engine
        with engine.lock, (engine.folder / "requests.jsonl").open("a") as log:
            log.write(json.dumps({"path": self.path, "pid": os.getpid(), "body": body}) + "\n")
        if not engine.completes:
            return self.loading()
        if engine.switches.refuse_warm_up:
            message = "this model does not support completions"
            return self.answer(engine.switches.refuse_warm_up, {"error": {"message": message}})
        if engine.switches.refuse_chat and self.path.startswith("/v1/chat"):
            return self.answer(500, {"error": {"message": "the template does not parse", "code": 500}})
        if engine.switches.poison and engine.switches.poison in json.dumps(body):
            print("cudaMalloc failed: out of memory", file=sys.stderr, flush=True)  # of the client's own text
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        if engine.switches.swallow and engine.switches.swallow in json.dumps(body):
            engine.held += b"x" * (512 << 20)
        number = engine.count()
        tokens = int(body.get("n_predict") or body.get("max_tokens") or 4)
        timings = {"predicted_per_second": engine.switches.tokens_s, "prompt_per_second": 1000.0}
        if body.get("stream"):
            return self.stream(number, tokens, body.get("hold_until", ""))
        if self.path == "/completion":
            return self.answer(200, {"content": "x" * tokens, "tokens_predicted": tokens, "timings": timings})
        if self.path == "/v1/embeddings":
            return self.answer(200, {"data": [{"embedding": [0.0, 1.0]}]})
        choice = {"index": 0, "message": {"role": "assistant", "content": "x" * tokens}, "finish_reason": "length"}
        usage = {"completion_tokens": tokens, "prompt_tokens": 1}
        return self.answer(200, {"choices": [choice], "usage": usage, "timings": timings})

    def stream(self, number: int, tokens: int, hold_until: str) -> None:
        """Answer in chunks. After the first it waits for the file that a test's request names in `hold_until`."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        death = self.engine.switches.death
        for chunk in range(1, tokens + 1):
            self.chunk(
                b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "x"}}]}).encode() + b"\n\n"
            )
            while hold_until and not Path(hold_until).exists():
                time.sleep(0.02)
            if death is not None and death.at == "request" and number >= death.request and chunk == death.chunk:
                time.sleep(0.05)  # what was written is on its way
                self.engine.die_if("request")
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def loading(self) -> None:
        self.answer(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})

    def answer(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no line of the log: llama-server prints none either."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class UnixServer(Server):
    address_family = socket.AF_UNIX


def main(arguments: list[str]) -> int:
    settings, *rest = arguments
    path = Path(settings)
    if "--help" in rest or "--version" in rest or "--list-devices" in rest:
        return describe(read_switches(path, 0), rest)
    with (path.parent / "starts").open("a") as log:
        log.write(f"{os.getpid()}\n")
    number = len((path.parent / "starts").read_text().split())
    options = {name: value for name, value in itertools.pairwise(rest) if name.startswith("--")}
    switches = read_switches(path, number)
    unknown = [
        name for name in rest if name in ("--no-mmap", "--load-mode") and name not in help_text(switches.help_era)
    ]
    if unknown:
        print(f"error: invalid argument: {unknown[0]}", file=sys.stderr)
        return 1
    if switches.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = Engine(path.parent, switches, options)
    handler = type("Bound", (Handler,), {"engine": engine})
    host = options["--host"]
    server = UnixServer(host, handler) if "/" in host else Server((host, int(options.get("--port", "8080"))), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    if os.environ.get("LLAMA_SERVER_ROUTER_PORT"):
        threading.Thread(target=leave_when_stdin_ends, daemon=True).start()
    engine.load()
    while True:
        signal.pause()


def leave_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def describe(switches: Switches, rest: list[str]) -> int:
    if "--version" in rest:
        print("version: 0.5.0-fake (build 1, commit 0a1b2c3d4)")
    elif "--help" in rest:
        print(help_text(switches.help_era))
    else:
        print("Available devices:")
        for device, name in switches.gpu.items() if switches.list_devices else ():
            print(f"  {device}: {name} (30500 MiB, 29100 MiB free)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
