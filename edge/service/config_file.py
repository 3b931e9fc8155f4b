"""/etc/edgellm/edgellm.toml of a service: what is there (or what its user ran with), and what the command line says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.errors import ConfigError
from edge.resources import load_toml

NAME = "edgellm.toml"


@dataclass(frozen=True, slots=True)
class Served:
    """One model as the service shall serve it: `ref` is good in the service's own store."""

    id: str
    ref: str


def base(paths: Sequence[Path]) -> tuple[dict[str, Any], Path | None]:
    """The first of these files that is there, as it stands. Raises ConfigError."""
    for path in paths:
        try:
            return load_toml(path), path
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}", "edgellm.toml is a TOML file") from error
    return {}, None


def merged(
    before: dict[str, Any],
    served: Sequence[Served],
    *,
    profile: str | None,
    listen: Sequence[str],
    dirs: Sequence[str],
) -> dict[str, Any]:
    """The rest stays as it was, aliases and settings of a model with the same id too. None and () say nothing."""
    after = copy.deepcopy(before)
    after.setdefault("schema", 1)
    if profile:
        after["profile"] = profile
    if listen:
        after["listen"] = list(listen)
    if dirs:
        store = after.setdefault("store", {})
        store["dirs"] = list(dict.fromkeys([*store.get("dirs", []), *dirs]))
    known = {model.get("id"): model for model in after.get("model", [])}
    after["model"] = [{**known.get(model.id, {}), "id": model.id, "ref": model.ref} for model in served]
    return after


def text(document: dict[str, Any], made_from: Path | None) -> str:
    import tomli_w

    came = f", from {made_from}" if made_from else ""
    head = f"# Written by `edgellm service install`{came}. It is yours: change it, then `systemctl restart edgellm`.\n"
    rest = {key: value for key, value in document.items() if key != "model"}
    models = "".join(f"\n[[model]]\n{_model(model)}" for model in document.get("model", []))
    return head + tomli_w.dumps(rest) + models


def _model(values: dict[str, Any]) -> str:
    """Tables of one model on one line, so that a person can write another [[model]] below."""
    import tomli_w

    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            inside = ", ".join(tomli_w.dumps({name: each}).strip() for name, each in value.items())
            lines.append(f"{key} = {{ {inside} }}\n")
        else:
            lines.append(tomli_w.dumps({key: value}))
    return "".join(lines)
