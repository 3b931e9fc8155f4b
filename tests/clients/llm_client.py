from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import BASE, KEY, MODEL, PERSON, check

folder = tempfile.mkdtemp()
Path(folder, "extra-openai-models.yaml").write_text(
    f"- model_id: box\n  model_name: {MODEL}\n  api_base: {BASE}/v1\n"
    "  api_key_name: box\n  can_stream: true\n  supports_schema: true\n  supports_tools: true\n"
)
program = Path(sys.executable).with_name("llm")


def llm(*arguments: str) -> str:
    done = subprocess.run(
        [program, *arguments, "--key", KEY],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LLM_USER_PATH": folder},
    )
    assert done.returncode == 0 and done.stdout.strip(), (done.returncode, done.stderr[-300:])
    return done.stdout.strip()


@check("prompt, stream")
def _() -> Any:
    return llm("-m", "box", "-o", "max_tokens", "16", "Say hello.")


@check("prompt, no stream")
def _() -> Any:
    return llm("-m", "box", "--no-stream", "-o", "max_tokens", "16", "Say hello.")


@check("schema")
def _() -> Any:
    options = ["-o", "max_tokens", "80", "-o", "temperature", "0"]
    return json.loads(llm("-m", "box", "--no-stream", *options, "--schema", json.dumps(PERSON), "A person"))


@check("go on with the conversation")
def _() -> Any:
    return llm("-c", "-o", "max_tokens", "8", "And again")
