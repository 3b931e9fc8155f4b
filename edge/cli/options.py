"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StateDir = Annotated[Path | None, typer.Option("--state-dir", metavar="DIR", help="the instance under DIR")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
