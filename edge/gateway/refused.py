"""The exception that ends a request with an answer of the gateway's own."""

from __future__ import annotations

from edge.gateway.openai import Fault


class Refused(Exception):
    """Ends a request with `fault` as its answer; only the handler catches it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault
