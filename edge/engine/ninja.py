"""Turn ninja's counter into progress and remaining time. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# NINJA_STATUS of our builds; the rest of the line is what is being made.
STATUS = "[%f/%t] "
_LINE = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a build. `eta_s` is None until enough steps are done."""

    done: int
    total: int
    what: str
    elapsed_s: float
    eta_s: float | None = None

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 0.0


@dataclass(slots=True)
class Meter:
    """Estimator of the remaining time. CUDA steps have a weight: one takes many times a C++ step's time."""

    cuda_steps: int = 0  # how many .cu files the whole build has
    cuda_weight: float = 8.0
    _cuda_done: int = 0
    _cuda_skipped: int | None = None

    def read(self, line: str, elapsed_s: float) -> Progress | None:
        """Return the progress after a line, None for lines that are no step."""
        match = _LINE.match(line.rstrip())
        if match is None:
            return None
        done, total = int(match[1]), int(match[2])
        if "CUDA object" in match[3]:
            self._cuda_done += 1
        return Progress(done, total, _what(match[3]), elapsed_s, self._eta(done, total, elapsed_s))

    def _eta(self, done: int, total: int, elapsed_s: float) -> float | None:
        if done < 8 or elapsed_s < 5:
            return None
        cuda_total = min(self.cuda_steps, total)
        spent = (done - self._cuda_done) + self._cuda_done * self.cuda_weight
        whole = (total - cuda_total) + cuda_total * self.cuda_weight
        return max(0.0, elapsed_s * (whole - spent) / spent)


def _what(text: str) -> str:
    """Return the file of a step: `Building CXX object src/llama.dir/llama-quant.cpp.o` → `llama-quant.cpp`."""
    last = text.split()[-1] if text.split() else text
    return last.rsplit("/", 1)[-1].removesuffix(".o")
