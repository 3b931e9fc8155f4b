"""Compare planned with allocated memory: weights, KV, compute and total, over many architectures and settings.

    python -m tests.bench.memory [--engine PATH] [--fit-params PATH] [--gpu] [--only NAME] [--rows FILE]

Without --engine the embedded CPU engine allocates. With --gpu every layer is offloaded to one NVIDIA GPU, and what
NVML counts for the process stands beside the sum of buffers. --fit-params: that of the same build, whose
estimates stand beside the plan's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edge.board.board import Board
from edge.board.probe import probe
from edge.config.values import Preset
from edge.engine.embedded_engine import find_embedded
from edge.engine.engine import Engine
from edge.engine.inspect import inspect
from edge.models.open import open_model
from edge.plan.argv import EnvFacts, environment, render
from edge.plan.inputs import Candidate, PlanInputs, candidate_of, role_of, situation
from edge.plan.ladder import settings
from edge.plan.ladder_steps import LadderStep
from edge.plan.memory import budget
from edge.plan.plan import Settings
from edge.units import MIB
from tests.bench.memory_models import MODELS, write_model
from tests.plan import shapes

_LINE = re.compile(r"(?P<where>\S+)\s+(?P<kind>model|KV|RS|compute|output) buffer size =\s+(?P<mib>[\d.]+) MiB")
LOG_BYTES = 64 * 1024  # the log has hundredths of a MiB, on up to six lines
# Tokens of one slot, slots, K and V type, flash attention.
SETTINGS = ((4096, 1, "f16", "on"), (16384, 2, "f16", "on"), (32768, 1, "q8_0", "on"), (4096, 4, "f16", "off"))


class Row(Struct, frozen=True):
    """Bytes planned and allocated of one model with one setting. `gpu_bytes`: NVML's figure for the process."""

    model: str
    setting: str
    planned: dict[str, int]
    allocated: dict[str, int]
    gpu_bytes: int | None = None
    fit: dict[str, int] | None = None  # as llama-fit-params estimates

    def error(self, kind: str) -> float:
        there = self.allocated[kind]
        return (self.planned[kind] - there) / there if there else float(bool(self.planned[kind]))

    @property
    def fit_error(self) -> float:
        """The error of the total that llama-fit-params prints."""
        return ((self.fit or {})["total"] - self.allocated["total"]) / self.allocated["total"]


Setting = tuple[int, int, str, str]


def measure(name: str, setting: Setting, engine: Engine, folder: Path, *, gpu: bool, fit: Path | None = None) -> Row:
    it = candidate_of(open_model(write_model(name, folder)))
    board = gpu_for(engine) if gpu else this_cpu()
    chosen, inputs, planned = plan(it, setting, board, engine)
    assert bool(chosen.n_gpu_layers) == gpu, "the engine has no machine code for the GPU"
    allocated, used = start(chosen, it, engine, inputs, folder)
    estimated = with_total(fit_params(fit, chosen, it.file.path)) if fit else None
    return Row(name, label(setting), with_total(planned), with_total(allocated), used, estimated)


def label(setting: Setting) -> str:
    n_ctx, slots, kv, flash = setting
    return f"{n_ctx}x{slots} {kv} {'fa' if flash == 'on' else 'no fa'}"


def plan(it: Candidate, setting: Setting, board: Board, engine: Engine) -> tuple[Settings, PlanInputs, dict[str, int]]:
    """Return the settings, and the planned bytes over all domains; all layers are on a GPU where the board has one."""
    n_ctx, slots, kv, flash = setting
    inputs = situation(board, shapes.memory(board), engine, "1GiB", {})
    gpu = bool(board.gpus)
    place = {"offload": "full", "load_mode": "none"} if gpu else {"offload": "none", "load_mode": "mmap"}
    preset = Preset(flash_attention=flash, cache_ram=0, **place)  # type: ignore[arg-type]
    step = LadderStep(n_ctx * slots, slots, kv, kv if flash == "on" else "f16")
    chosen = settings(preset, step, it, role_of(it.file.meta, "chat"), inputs)
    chosen = replace(chosen, ctx_checkpoints=0)
    planned = {"weights": 0, "kv": 0, "compute": 0}
    for domain in budget(it, chosen, inputs).values():
        planned["weights"] += domain.weights_bytes
        planned["kv"] += domain.kv_bytes
        planned["compute"] += domain.compute_bytes
    return chosen, inputs, planned


def fit_params(tool: Path, chosen: Settings, model: str) -> dict[str, int]:
    """Return what `llama-fit-params --fit-print on` prints: whole MiB of model, context and compute for each device."""
    line = [str(tool), "--model", model, "--fit-print", "on", "--ctx-size", str(chosen.n_ctx)]
    line += ["--parallel", str(chosen.n_parallel), "--batch-size", str(chosen.n_batch)]
    line += ["--ubatch-size", str(chosen.n_ubatch), "--flash-attn", chosen.flash_attention]
    line += ["--cache-type-k", chosen.kv_type_k, "--cache-type-v", chosen.kv_type_v]
    line += ["--n-gpu-layers", str(chosen.n_gpu_layers), *(() if chosen.n_gpu_layers else ("--device", "none"))]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    rows = [words for words in map(str.split, done.stdout.splitlines()) if len(words) == 4 and words[1].isdecimal()]
    if done.returncode or not rows:
        raise RuntimeError(f"llama-fit-params: {done.stderr[-400:]}")
    kinds = ("weights", "kv", "compute")
    return {kind: sum(int(words[index]) for words in rows) * MIB for index, kind in enumerate(kinds, 1)}


def gpu_for(engine: Engine) -> Board:
    """A machine with a GPU of the newest architecture that the engine has machine code for."""
    newest = max(engine.built_for, default=89)
    board = shapes.gpu_board(140)
    return replace(board, gpus=(replace(board.gpus[0], compute_capability=f"{newest // 10}.{newest % 10}"),))


def this_cpu() -> Board:
    """A machine with room, and the instructions of this one: they decide which weights are repacked."""
    return replace(shapes.cpu_board(64), cpu=probe().cpu)


def with_total(parts: dict[str, int]) -> dict[str, int]:
    return {**parts, "total": sum(parts.values())}


def start(
    chosen: Settings, it: Candidate, engine: Engine, inputs: PlanInputs, folder: Path
) -> tuple[dict[str, int], int | None]:
    """Load the model and return the bytes of the log's buffer lines, and NVML's figure on a GPU."""
    socket = folder / "engine.sock"
    socket.unlink(missing_ok=True)
    line = render(chosen, engine, it.file, "m").args
    env = environment(engine, EnvFacts(str(folder), str(folder)))
    sums = {"weights": 0, "kv": 0, "compute": 0}
    names = {"model": "weights", "KV": "kv", "RS": "kv", "compute": "compute", "output": "compute"}
    command = [str(socket) if part == "{socket}" else part for part in line]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    ) as child:
        assert child.stderr is not None
        timer = threading.Timer(120, child.kill)
        timer.start()
        tail: list[str] = []
        try:
            for text in child.stderr:
                tail.append(text)
                for found in _LINE.finditer(text):
                    sums[names[found["kind"]]] += int(float(found["mib"]) * MIB)
                if "model loaded" in text or "server is listening" in text:
                    return sums, gpu_bytes(child.pid) if chosen.n_gpu_layers else None
        finally:
            timer.cancel()
            child.kill()
    raise RuntimeError("the engine did not load the model:\n" + "".join(tail[-12:]))


def gpu_bytes(pid: int) -> int | None:
    """Return the GPU memory of a process by nvidia-smi."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        number, _, size = line.partition(",")
        if number.strip() == str(pid) and size.strip().isdecimal():
            return int(size) * MIB
    return None


def within(row: Row) -> bool:
    """The limits of a plan: weights 0.5 %, KV 1 %, compute 15 % or 24 MiB, total 2 % and never under."""
    compute = abs(row.planned["compute"] - row.allocated["compute"])
    return (
        abs(row.error("weights")) <= 0.005
        and abs(row.error("kv")) <= 0.01
        and (abs(row.error("compute")) <= 0.15 or compute <= 24 * MIB)
        and row.error("total") <= 0.02
        and row.planned["total"] + LOG_BYTES >= row.allocated["total"]
    )


def table(rows: list[Row]) -> str:
    """Return one line a model: the largest errors over its settings."""
    fit = all(row.fit for row in rows)
    heads = [
        "model",
        "weights",
        "KV",
        "compute",
        "total",
        "compute, MiB",
        *(["llama-fit-params, total"] if fit else []),
    ]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        worst = [max((row.error(kind) for row in own), key=abs) for kind in ("weights", "kv", "compute", "total")]
        off = max((row.planned["compute"] - row.allocated["compute"] for row in own), key=abs) / MIB
        cells = [name, *(f"{error:+.1%}" for error in worst), f"{off:+.1f}"]
        cells += [f"{max((row.fit_error for row in own), key=abs):+.1%}"] if fit else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", type=Path, help="a llama-server; else the embedded engine")
    parser.add_argument("--fit-params", type=Path, help="the llama-fit-params of that llama-server")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", help="a part of the models' names")
    parser.add_argument("--rows", type=Path, help="append every row as a line of JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mem-", dir="/tmp") as name:
        folder = Path(name)
        engine = inspect(options.engine, folder / "inspect") if options.engine else find_embedded(sys.executable)
        assert engine is not None, "the embedded engine is part of the development extras"
        for model in MODELS:
            if options.only and options.only not in model:
                continue
            for setting in SETTINGS:
                try:
                    rows.append(measure(model, setting, engine, folder, gpu=options.gpu, fit=options.fit_params))
                    if options.rows:
                        with options.rows.open("ab") as file:
                            file.write(msgspec.json.encode(rows[-1]) + b"\n")
                except RuntimeError as error:
                    print(f"{model}: {error}", file=sys.stderr)
                    break
            (folder / f"{model}.gguf").unlink(missing_ok=True)
    print(table(rows))
    off = [row for row in rows if not within(row)]
    print(f"{len(rows)} rows, {len(rows) - len(off)} within the limits")
    for row in off:
        parts = ", ".join(f"{k} {row.planned[k] / MIB:.1f}/{row.allocated[k] / MIB:.1f}" for k in row.planned)
        print(f"  {row.model} {row.setting}: {parts}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
