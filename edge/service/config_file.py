"""Write /etc/edgellm/edgellm.toml from an existing configuration and the options of `service install`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.errors import ConfigError
from edge.resources import load_toml

NAME = "edgellm.toml"


class Served(Struct, frozen=True):
    """One model of the service; `ref` resolves in the service's own store."""

    id: str
    ref: str


def read_base(paths: Sequence[Path]) -> tuple[dict[str, Any], Path | None]:
    """Read the first of these files that exists. Raises ConfigError for one that cannot be parsed."""
    for path in paths:
        try:
            return load_toml(path), path
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}", "edgellm.toml is a TOML file") from error
    return {}, None


def merge(
    before: dict[str, Any], served: Sequence[Served], *, profile: str | None, listen: Sequence[str], dirs: Sequence[str]
) -> dict[str, Any]:
    """Return the document with these options; all other keys stay. None and () leave a key as it is."""
    # The caller compares both documents to show what changes.
    after = copy.deepcopy(before)
    after.setdefault("schema", 1)
    if profile:
        after["profile"] = profile
    if listen:
        after["listen"] = list(listen)
    if dirs:
        store = after.setdefault("store", {})
        store["dirs"] = list(dict.fromkeys([*store.get("dirs", []), *dirs]))
    # Aliases and settings belong to the id; only the file behind it moves into the service's store.
    known = {model.get("id"): model for model in after.get("model", [])}
    after["model"] = [{**known.get(model.id, {}), "id": model.id, "ref": model.ref} for model in served]
    return after


def config_text(document: dict[str, Any], made_from: Path | None) -> str:
    """Return the TOML text; `made_from` is the file that it started from."""
    import tomli_w

    origin = ", from " + ascii(str(made_from))[1:-1] if made_from else ""
    head = f"# Written by `edgellm service install`{origin}. After a change: `systemctl restart edgellm`.\n"
    rest = {key: value for key, value in document.items() if key != "model"}
    models = "".join(f"\n[[model]]\n{_model(model)}" for model in document.get("model", []))
    return head + tomli_w.dumps(rest) + models


def _model(values: dict[str, Any]) -> str:
    """Return the keys of one model with its tables inline: a user may append another [[model]] below."""
    import tomli_w

    def key(name: str) -> str:
        return tomli_w.dumps({name: 0}).rpartition(" = ")[0]

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{ {', '.join(f'{key(name)} = {inline(each)}' for name, each in value.items())} }}"
        if isinstance(value, list):
            return f"[{', '.join(map(inline, value))}]"
        return tomli_w.dumps({"x": value}).partition(" = ")[2].strip()

    return "".join(f"{key(name)} = {inline(value)}\n" for name, value in values.items())
