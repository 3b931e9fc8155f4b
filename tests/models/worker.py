"""Does one long work in a process of its own, to be killed: python -m tests.models.worker KIND MODELS ARGUMENT…"""

from __future__ import annotations

import sys
from pathlib import Path


def main(kind: str, models: Path, *arguments: str) -> None:
    print("begun", flush=True)
    if kind == "pull":
        from edge.models.pull import pull

        pull(arguments[0], models)
    elif kind == "import":
        from edge.models.install import import_model

        import_model(Path(arguments[0]), models)
    elif kind == "quantize":
        from edge.models.open import open_model
        from edge.models.quantize import quantize

        quantize(open_model(Path(arguments[0])), "Q5_K_M", models, Path(arguments[1]))
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
