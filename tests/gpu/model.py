"""A random model of a given size for a GPU: model.py FILE GB. Q8_0, head size 128, llama shapes."""

from __future__ import annotations

import sys
from pathlib import Path

from edge.builder.tiny_model import Shape, write_tiny_model

LAYER_BYTES = (4 * 4096 * 4096 + 3 * 4096 * 11008) * 34 // 32


def main(file: str, gigabytes: str) -> None:
    layers = max(1, round(float(gigabytes) * 1e9 / LAYER_BYTES))
    path = write_tiny_model(Path(file), Shape(layers, n_embd=4096, n_head=32, n_ff=11008, n_ctx_train=8192))
    print(f"{path}: {layers} layers, {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main(*sys.argv[1:3])
