"""Find the vision or audio projector (`mmproj`) of a model by header, if the choice is unambiguous."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.errors import BadModelError
from edge.model.header import peek_kind, read_header
from edge.model.quant import public_name

# mmproj, mm-proj, mmprojector: the spellings on the hub.
_WORD = re.compile(r"(?:^|[-_. ])mm-?proj(?:ector)?(?=$|[-_. ])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pairing:
    """`path` is the projector to use, None without one; `note` is the reason if the folder holds some."""

    path: Path | None = None
    note: str | None = None


def beside(model: Path) -> Pairing:
    """Pair a model with a projector of its folder, by the headers of the files there."""
    projectors, models = [], {public_name(str(model))}
    try:
        siblings = sorted(model.parent.iterdir())
    except OSError:  # a folder that may be entered but not listed
        return Pairing()
    for path in siblings:
        if path.name.lower().endswith(".gguf") and path != model:
            if peek_kind(path) == "mmproj":
                projectors.append(path)
            else:
                models.add(public_name(str(path)))
    return pair(model, projectors, models)


def pair(model: Path, projectors: Sequence[Path], models: Collection[str]) -> Pairing:
    """Choose the projector of `model` in a folder that holds models of the names `models`.

    One that carries the model's name wins over one that carries none; a lone projector beside a lone model needs no
    name. Anything else is a choice, and choices are the user's.
    """
    if not projectors:
        return Pairing()
    wanted = _plain(public_name(str(model)))
    named = [path for path in projectors if _plain(stem(path)) == wanted]
    nameless = [path for path in projectors if not stem(path)]
    for group in (named, nameless if len(models) == 1 else [], projectors if len(models) == 1 else []):
        if len(group) == 1:
            return Pairing(group[0])
        if group:
            break
    names = ", ".join(sorted(path.name for path in (named or projectors)))
    return Pairing(None, f"no projector is used, because several may belong to this model: {names}; set mmproj=PATH")


def stem(path: Path) -> str:
    """Strip `mmproj`, quantization and extension from a projector's name: the model's name, or an empty string."""
    rest = _WORD.sub("-", path.name[: -len(".gguf")] if path.name.lower().endswith(".gguf") else path.name)
    rest = rest.strip("-_. ")
    if not rest:
        return ""
    name = public_name(rest + ".gguf")
    return "" if name == "model" and rest.lower() != "model" else name


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def usable(paired: Pairing) -> tuple[Pairing, int]:
    """Return the pairing and its bytes; a broken projector becomes a note, as the model can serve without it."""
    if paired.path is None:
        return paired, 0
    try:
        return paired, check(paired.path)
    except (BadModelError, OSError) as error:
        return Pairing(None, f"its projector is not used: {error}"), 0


def check(path: Path) -> int:
    """Return the tensor bytes of a projector that the user named. Raises BadModelError if it is something else."""
    meta = read_header(path)
    if meta.kind != "mmproj":
        raise BadModelError(
            f"{path.name} is a {meta.kind}, not a projector", "give a file whose header has the type mmproj"
        )
    return meta.tensor_bytes
