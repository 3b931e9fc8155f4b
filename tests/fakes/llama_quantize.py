"""A process that behaves like llama-quantize, well or badly. `install(folder, mode)` puts it there as an executable.

Modes: good (copies its input), fails (partial output, exit 1, the real tool's words), torn (exit 0, half an output),
loses (exit 0, a tensor is missing), dies (kills itself), endless (writes until it is killed; its pid in `pid`).
It writes its arguments to `argv` beside itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path, mode: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mode").write_text(mode)
    tool = folder / "llama-quantize"
    tool.write_text(
        f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.fakes.llama_quantize import main\nmain({str(folder)!r})\n"
    )
    tool.chmod(0o755)
    return tool


def main(folder: str) -> None:
    home = Path(folder)
    (home / "argv").write_text("\n".join(sys.argv[1:]))
    mode = (home / "mode").read_text()
    source, target = [Path(word) for word in sys.argv[1:] if not word.startswith("--")][:2]
    data = source.read_bytes()
    print(f"llama_quantize: quantizing '{source}' to '{target}'", flush=True)
    if mode == "endless":
        endless(home, target)
    steps = 40
    with target.open("wb") as file:
        for step in range(1, steps + 1):
            print(
                f"[{step:4d}/{steps:4d}] blk.{step}.ffn_up.weight - [ 256, 512, 1, 1], type = f16, converting",
                flush=True,
            )
            file.write(data[len(data) * (step - 1) // steps : len(data) * step // steps])
            if step == steps // 2 and mode != "good":
                file.flush()
                misbehave(mode, target)
    print("llama_model_quantize_impl: WARNING: 3 of 9 tensor(s) required fallback quantization", flush=True)


def misbehave(mode: str, target: Path) -> None:
    if mode == "fails":
        print("llama_model_quantize: failed to quantize: requantizing from type q4_1 is disabled")
        sys.exit(1)
    if mode == "torn":
        sys.exit(0)
    if mode == "loses":
        from tests.fakes.gguf_writer import Gguf

        Gguf("llama").model(n_layer=1).save(target)
        sys.exit(0)
    if mode == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)


def endless(home: Path, target: Path) -> None:
    with target.open("wb") as file:
        (home / "pid").write_text(str(os.getpid()))
        while True:
            file.write(b"x" * 4096)
            print("[   1/ 999] blk.0.attn_q.weight - slow", flush=True)
            time.sleep(0.01)
