"""The engine that `edgellm build` would make, for boards that are not present or have none yet. Pure."""

from __future__ import annotations

from edge.board.board import Board
from edge.engine.engine import Engine, Flag

_VALUES = (
    "--model --alias --host --ctx-size --parallel --batch-size --ubatch-size --cache-type-k --cache-type-v "
    "--flash-attn --cache-ram --ctx-checkpoints --n-gpu-layers --device --split-mode --tensor-split --fit --threads "
    "--threads-batch --mmproj --load-mode --log-colors --pooling"
)
_SWITCHES = (
    "--no-context-shift --log-timestamps --log-prefix --no-ui --offline --no-warmup --slots --props --metrics "
    "--embedding --reranking --jinja"
)


def assumed_engine(board: Board, recipe: str, path: str) -> Engine:
    """Return a llama-server of the newest spelling, with CUDA where the board has a GPU and the recipe is for one."""
    cuda = recipe != "cpu" and board.compute_capability is not None and board.refused is None
    capability = int(board.compute_capability.replace(".", "")) if board.compute_capability and cuda else None
    flags = {name: Flag(name, 1) for name in _VALUES.split()} | {name: Flag(name, 0) for name in _SWITCHES.split()}
    flags["--verbosity"] = Flag("--verbosity", 1, ("0", "1", "2", "3", "4", "5"))
    return Engine(
        id=f"{recipe or 'cpu'} (not built yet)",
        kind="llama-server",
        path=path,
        flags=flags,
        cuda=cuda,
        built_for=(capability,) if capability else (),
    )
