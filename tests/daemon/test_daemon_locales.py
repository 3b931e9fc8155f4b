"""Locales as glibc has them, not only an encoding of stdout: arguments and files are decoded by them too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import PATIENCE_S, Up, environment

pytestmark = pytest.mark.full

CHARMAPS = Path("/usr/share/i18n/charmaps")  # Debian's package `locales`
LOCALES = {"zh_CN.GBK": ("zh_CN", "GBK"), "de_DE.ISO-8859-1": ("de_DE", "ISO-8859-1")}
MODEL = "MODEL"  # stands for the file
COMMANDS = (
    ("status",),
    ("top", "--once"),
    ("ps",),
    ("timeline",),
    ("logs",),
    ("logs", "--engine"),
    ("wait",),
    ("chat", "--max-tokens", "4", "你好, Grüße"),
    ("board",),
    ("doctor", "--quick"),
    ("config", "show"),
    ("config", "check"),
    ("profile", "list"),
    ("engine", "list"),
    ("model", "list"),
    ("model", "show", MODEL),
    ("model", "check", MODEL),
    ("key", "list"),
    ("plan", "-p", "cpu", "-m", MODEL),
)


@pytest.fixture(params=LOCALES)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a user with that locale."""
    if not CHARMAPS.is_dir() or shutil.which("localedef") is None:
        assert not os.environ.get("CI"), "apt-get install locales"
        pytest.skip("no localedef, or no character maps: apt-get install locales")
    name: str = request.param
    source, charmap = LOCALES[name]
    (tmp_path / "locales").mkdir()
    subprocess.run(["localedef", "-i", source, "-f", charmap, str(tmp_path / "locales" / name)], check=True)
    found = {"LOCPATH": str(tmp_path / "locales"), "LC_ALL": name, "LANG": name}
    ask = "import locale, sys; print(locale.getpreferredencoding(False), sys.getfilesystemencoding())"
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment(found), capture_output=True, text=True, check=True
    )
    assert charmap.lower().replace("-", "") in done.stdout.lower().replace("-", ""), done.stdout
    return found


def test_up_gets_ready_and_each_command_answers(settings: dict[str, str], short_dir: Path, smollm2: Path) -> None:
    """The configuration is UTF-8, as TOML is."""
    state = short_dir / "s"
    for folder in ("data/models", "config"):
        (state / folder).mkdir(parents=True)
    model = state / "data/models/Tiny.gguf"
    shutil.copy(smollm2, model)
    text = '# 中文注释, Überschrift\nschema = 1\nprofile = "cpu"\n'
    (state / "config/edgellm.toml").write_text(text, encoding="utf-8")
    with Up(state, "-m", f"chat={model}", env=settings) as up:
        up.wait_for("ok")
        for command in COMMANDS:
            words = [str(model) if word == MODEL else word for word in command]
            done = subprocess.run(
                [sys.executable, "-m", "edge", *words],
                env=environment({**settings, "EDGELLM_STATE_DIR": str(state)}),
                capture_output=True,
                timeout=PATIENCE_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            findings = command[0] == "doctor" and done.returncode == 1
            assert done.returncode == 0 or findings, (command, done.stdout[-900:], done.stderr[-900:])
            assert b"Traceback" not in done.stderr, command
        assert up.chat("你好").status_code == 200
    assert up.process.returncode == 0
