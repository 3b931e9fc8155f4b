"""The one exception that becomes an answer."""

from __future__ import annotations

from edge.gateway.openai import Fault


class Refused(Exception):
    """A request ends here with an answer of ours."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault
