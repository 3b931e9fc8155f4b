"""A saved prompt that is restored after a restart, against the same prompt computed again.

    python -m tests.bench.saved_prompts MODEL.gguf [--rounds 3] [--tokens 2000] [--threads 2] [--engine ID|PATH]

Each round: start, ask with the long prompt, stop, start again, and ask with the same prompt and another question. Both
answers are one token, measured by a client of the API. Restored must be 20 times sooner.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.rows import Row, engine_parser, report, up_arguments
from tests.serving import Up

LEAST_RATIO = 20.0


def main() -> int:
    parser = engine_parser(__doc__, threads=2, reports=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    computed, restored, tokens, size = [], [], 0, 0
    for _ in range(options.rounds):
        state = Path(tempfile.mkdtemp(prefix="e-"))
        try:
            first_s, _ = ask(options, state, "What is the first number?")
            size = sum(path.stat().st_size for path in (state / "cache/prompts/main").glob("*.slot"))
            again_s, tokens = ask(options, state, "What is the last number?")
            computed.append(first_s)
            restored.append(again_s)
        finally:
            shutil.rmtree(state, ignore_errors=True)
    ratio = statistics.median(computed) / statistics.median(restored)
    rows = [
        Row(f"computed, median of {options.rounds}", statistics.median(computed), "s"),
        Row(f"restored, {tokens} tokens", statistics.median(restored), "s"),
        Row("file", size / 1e6, "MB"),
        Row(f"restored of computed (1/{ratio:.0f})", 100 / ratio, "%", 100 / LEAST_RATIO),
    ]
    return report(rows, as_json=options.json)


def ask(options: argparse.Namespace, state: Path, question: str) -> tuple[float, int]:
    """Return the seconds to the answer, and how many tokens of the prompt came from the cache."""
    text = " ".join(f"Word number {number} is followed by another." for number in range(options.tokens // 10))
    with Up(state, *up_arguments(options), "--set", "saved_prompts=on", "--set", "n_ctx=4096") as up:
        up.wait_for("ok")
        began_s = time.monotonic()
        answer = up.chat(f"{text} {question}", max_tokens=1, timeout=600)
        took_s = time.monotonic() - began_s
        answer.raise_for_status()
        return took_s, int(answer.json()["timings"]["cache_n"])


if __name__ == "__main__":
    sys.exit(main())
