"""The choice of a model costs no time that a request could notice, and the router gets the plan's options."""

from __future__ import annotations

from tests.bench.pool_swap import router_options, routing


def test_a_choice_among_twenty_models_is_made() -> None:
    assert routing(rounds=5) > 0


def test_the_router_gets_the_options_without_file_name_and_address() -> None:
    argv = ["/e/llama-server", "--model", "/m.gguf", "--alias", "a", "--host", "{socket}", "-c", "512", "--no-ui"]
    assert router_options(argv) == ["-c", "512", "--no-ui"]
