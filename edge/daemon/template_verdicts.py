"""Ask the engine for its verdict on each chat_template_file before a model starts with it."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from edge.engine.engine import Engine
from edge.errors import ConfigError, EngineBrokenError
from edge.linux.files import read_bounded, read_json, write_json
from edge.paths import Folders
from edge.plan.prepare import Prepared, preset_of

_KEPT = 50  # verdicts, the latest


def judged(prepared: Prepared, folders: Folders, *, ask: bool = True) -> Prepared:
    """Return the plan as it is. Raises ConfigError for a chat_template_file that its engine refuses.

    Templates that an engine took before are not asked for again. With `ask` False the files are only read, so that a
    start which is remembered depends on them. An engine that gives no verdict judges when the model starts.
    """
    for model in prepared.plan.models.values():
        path = preset_of(prepared, model.id).chat_template_file
        if not path or model.other is not None or model.ladder.plans[model.ladder.chosen].settings.role != "chat":
            continue
        try:
            text = read_bounded(Path(path)).decode()
        except (OSError, ValueError) as error:  # no regular file, one that is too large, or no UTF-8
            raise ConfigError(f"chat_template_file: {path}: {error}", "a file with a Jinja template") from None
        fault = _fault(prepared.plan.engine, text, folders) if ask else None
        if fault is not None:
            hint = "`edgellm model check NAME --template FILE` judges another one"
            raise ConfigError(f"chat_template_file: the engine refuses {path}: {fault}", hint)
    return prepared


def _fault(engine: Engine, text: str, folders: Folders) -> str | None:
    """Return the engine's reason to refuse a template; None where it takes it, or gives no verdict."""
    kept = folders.instance_state / "template_verdicts.json"
    known = _taken(kept)
    key = hashlib.sha256("\0".join((engine.id, str(engine.version), str(engine.commit), text)).encode()).hexdigest()
    if key in known:
        return None
    from edge.builder.template_check import template_fault  # late: most starts have nothing to ask
    from edge.models.header import CHAT_TEMPLATE

    try:
        fault = template_fault(engine, {CHAT_TEMPLATE: text}, renders=False)
    except EngineBrokenError:
        return None
    if fault is None:
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, [*known, key][-_KEPT:])
    return fault


def _taken(path: Path) -> list[str]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
