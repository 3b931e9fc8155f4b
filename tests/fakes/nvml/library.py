"""Builds the fake NVML where LD_LIBRARY_PATH may point."""

import subprocess
from pathlib import Path


def build(folder: Path) -> Path:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", Path(__file__).with_name("nvml.c")], check=True
    )
    return folder
