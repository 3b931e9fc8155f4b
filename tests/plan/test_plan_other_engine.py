"""An engine beside llama.cpp in the plan: its claim, what was measured, and its place among the models."""

from __future__ import annotations

from typing import Any

import pytest

from edge.config.values import ModelConfig
from edge.errors import DoesNotFitError, ModelMissingError, UnavailableError
from edge.plan.other_engine import fingerprint
from edge.plan.plan import OtherEngine, Plan
from edge.plan.planner import Extras, make_plan
from edge.units import GIB, MIB
from tests.plan import shapes
from tests.plan.test_plan_planner import FACTS, chosen, one, plan, profile, why


def ears(**values: Any) -> ModelConfig:
    known: dict[str, Any] = {"memory": GIB, "routes": ("/v1/audio/transcriptions",), "origin": "edgellm.toml: model 2"}
    return ModelConfig("ears", command=("whisper-server", "--port", "{port}"), **known | values)


def planned(board: shapes.Board, *others: ModelConfig, **more: Any) -> Plan:
    return plan(board, extras=Extras(others=others, **more))


def test_the_claim_is_taken_from_what_is_left_for_later_models() -> None:
    board = shapes.cpu_board()
    found = planned(board, ears(priority=1))
    assert list(found.models) == ["chat", "ears"]
    rung = chosen(found, "ears")
    assert (rung.argv[0], rung.budget["host"].claim_bytes, rung.budget["host"].required_bytes) == (
        "whisper-server",
        GIB,
        GIB,
    )
    alone = chosen(plan(board)).budget["host"].available_bytes
    assert chosen(found).budget["host"].available_bytes == alone - GIB
    assert why(rung, "command") == (
        "whisper-server --port '{port}'",
        "serves /v1/audio/transcriptions",
        "edgellm.toml: model 2",
    )


def test_a_measurement_replaces_the_claim_and_is_named() -> None:
    config = ears()
    found = planned(shapes.cpu_board(), config, claims={fingerprint(config): {"host": 300 * MIB}})
    rung = chosen(found, "ears")
    assert rung.budget["host"].claim_bytes == 300 * MIB
    assert why(rung, "host memory") == ("300.0 MiB", "what its last start took; 1.0 GiB were claimed", "measured")
    other = ears(env={"OMP_NUM_THREADS": "8"})
    assert fingerprint(other) != fingerprint(config)


@pytest.mark.parametrize(
    ("claim", "measured", "then"),
    [
        ({"host": 100}, {}, {"host": 100}),
        ({"host": 100}, {"host": 40}, {"host": 40}),
        ({"host": 100, "GPU-0": 50}, {"host": 40}, {"host": 40, "GPU-0": 50}),
        ({"unified": 100}, {"unified": 40}, {"unified": 100}),
        ({"unified": 100}, {"unified": 140}, {"unified": 140}),
    ],
)
def test_fc_20_unified_memory_is_only_raised(
    claim: dict[str, int], measured: dict[str, int], then: dict[str, int]
) -> None:
    """FC-20: the kernel of a Jetson does not count GPU allocations for the process."""
    assert OtherEngine("/health", (), claim).corrected(measured) == then


def test_gpu_memory_is_of_the_first_gpu_or_of_the_unified_memory() -> None:
    discrete = chosen(planned(shapes.gpu_board(8), ears(gpu_memory=GIB)), "ears")
    gpu = next(name for name in discrete.budget if name != "host")
    assert discrete.budget[gpu].claim_bytes == GIB
    assert discrete.env["CUDA_VISIBLE_DEVICES"] == gpu
    unified = chosen(planned(shapes.jetson(15), ears(gpu_memory=GIB)), "ears")
    assert {name: domain.claim_bytes for name, domain in unified.budget.items()} == {"unified": 2 * GIB}
    assert "CUDA_VISIBLE_DEVICES" not in unified.env
    hidden = chosen(planned(shapes.gpu_board(8), ears()), "ears")
    assert hidden.env["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(UnavailableError, match="none whose memory is known"):
        planned(shapes.cpu_board(), ears(gpu_memory=GIB))


def test_what_fits_only_alone_takes_turns_and_what_never_fits_is_refused() -> None:
    board = shapes.cpu_board()
    room = chosen(plan(board)).budget["host"]
    alone = room.available_bytes - room.reserve_bytes
    turns = planned(board, ears(memory=alone)).models["ears"]
    assert turns.takes_turns
    assert "they take turns" in turns.warnings[0]
    with pytest.raises(DoesNotFitError, match=r"of host memory are missing") as refused:
        planned(board, ears(memory=alone + 1))
    assert "claim" in str(refused.value.table)


def test_other_engines_alone_are_a_plan_and_none_at_all_is_not() -> None:
    board = shapes.cpu_board()
    inputs = (board, shapes.memory(board), profile(), shapes.engine(cuda=False))
    alone = make_plan(*inputs, {}, FACTS, Extras(others=(ears(),)))
    assert list(alone.models) == ["ears"]
    with pytest.raises(ModelMissingError):
        make_plan(*inputs, {}, FACTS)
    assert one()  # the other tests plan beside this model
