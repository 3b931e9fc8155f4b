"""The first image must not take memory that was not in the plan: estimated, limited, and sent by the warm-up."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge.builder.tiny_model import Shape, tiny_model, write_tiny_model
from edge.config.values import Preset
from edge.engine.engine import Flag
from edge.models.header import read_header
from edge.models.meta import ModelMeta
from edge.models.open import open_model
from edge.models.projector import Projector, projector_of
from edge.plan.argv import common_params, render
from edge.plan.calibration import Calibration, calibrate, measure
from edge.plan.companions import images_of
from edge.plan.inputs import Candidate, candidate_of, situation
from edge.plan.ladder import settings, walk_ladder
from edge.plan.ladder_steps import LadderStep
from edge.plan.memory import budget
from edge.plan.plan import LaunchPlan, Settings
from edge.supervisor import warmup
from edge.supervisor.policy import Policy, SupervisorOptions
from edge.supervisor.traffic import Traffic
from edge.supervisor.warmup_run import EngineClient, Warming
from edge.units import GIB, MIB
from tests.fakes.projectors import SHAPES, write_projector
from tests.fakes.upstream.real import real_engine
from tests.plan import shapes
from tests.serving import eventually

_BUFFER = re.compile(r"reserve_compute_meta: .*compute buffer size = +([\d.]+) MiB")


def header(kind: str, **sizes: int) -> ModelMeta:
    keys: dict[str, int | str] = {f"clip.vision.{name.replace('__', '.')}": size for name, size in sizes.items()}
    return replace(shapes.meta(), kind="mmproj", extra={**keys, "clip.projector_type": kind})


CLIP = {"image_size": 336, "patch_size": 14, "embedding_length": 1024, "feed_forward_length": 4096}
SIGLIP = {"image_size": 896, "patch_size": 14, "embedding_length": 1152, "feed_forward_length": 4304}
QWEN = {"image_size": 560, "patch_size": 14, "embedding_length": 1280, "feed_forward_length": 3420}


ABLE = replace(shapes.engine(), flags=shapes.engine().flags | {"--image-max-tokens": Flag("--image-max-tokens", 1)})


def seeing(projector: Projector | None) -> Candidate:
    it = candidate_of(shapes.model())
    return replace(it, file=replace(it.file, mmproj="/m/mmproj.gguf", projector=projector))


def test_the_compute_of_an_encoder_follows_its_header() -> None:
    assert projector_of(header("mlp", **CLIP)).compute_bytes() == 24 * 24 * 4 * (2 * 4096 + 5 * 1024) + 4 * MIB
    assert 220 * MIB <= projector_of(header("gemma3")).compute_bytes() <= 240 * MIB, "unknown is the measured one"
    lying = {**dict.fromkeys(CLIP, 2**31), "patch_size": 1}
    assert projector_of(header("mlp", **lying)).compute_bytes(flash_attention=False) < 1 << 60
    for wide in ({"patch_size": 10**7}, {**CLIP, "image_size": 14336}):
        assert projector_of(header("mlp", **wide)).side_px() == 2048, "the warm-up's image has this side"


def test_an_encoder_that_takes_any_size_is_planned_with_its_largest_image() -> None:
    """4096 tokens of four patches each, which is what a photograph of 12 megapixels is scaled to."""
    qwen = projector_of(header("qwen2.5vl_merger", **QWEN))
    assert qwen.patches == 16384 and qwen.patches_of(1024) == 4096 and qwen.patches_of(9999) == 16384
    assert qwen.compute_bytes() > 2 * GIB, "its window mask has a value for each pair of patches"
    assert projector_of(header("pixtral", **SIGLIP)).patches == 1024
    assert projector_of(header("phi4", **SIGLIP, image_max_pixels=14 * 14 * 9000)).patches == 9000
    assert projector_of(header("hunyuanvl", **SIGLIP, image_max_pixels=14 * 14 * 9000)).tokens is None
    tiles = projector_of(header("internvl", image_size=448, patch_size=14))
    assert tiles.images == 4, "tiles of 256 tokens, 1024 tokens at once"
    newer = projector_of(header("of-next-year", **CLIP))
    assert newer.patches == 4096 and newer.tokens is None


def test_sound_has_an_encoder_of_its_own() -> None:
    keys = {"clip.has_audio_encoder": True, "clip.audio.embedding_length": 1280, "clip.audio.feed_forward_length": 5120}
    deaf = header("qwen2a")
    hearing = projector_of(replace(deaf, extra=deaf.extra | keys))
    assert hearing.patches == 0 and 90 * MIB < hearing.compute_bytes() < 110 * MIB
    both = projector_of(
        replace(deaf, extra=header("gemma3", **SIGLIP).extra | keys | {"clip.has_vision_encoder": True})
    )
    alone = projector_of(header("gemma3", **SIGLIP))
    assert both.compute_bytes() == alone.compute_bytes() + hearing.compute_bytes()


@pytest.mark.parametrize("gpus", [(36.0,), (), (12.0, 12.0)])
def test_the_first_image_is_paid_for_before_it_comes(gpus: tuple[float, ...]) -> None:
    """+220 MiB after READY were measured with a projector: its compute buffers are allocated by the first image."""
    board = shapes.gpu_board(*gpus) if gpus else shapes.cpu_board()
    inputs = situation(board, shapes.memory(board), shapes.engine(cuda=bool(gpus)), "1GiB", {})
    preset = Preset(offload="full" if gpus else "none")
    step = LadderStep(4096, 1, "f16", "f16")
    blind, sighted = seeing(None), seeing(projector_of(header("gemma3", **SIGLIP)))
    name = inputs.gpus[0] if gpus else inputs.host
    one, other = (budget(it, settings(preset, step, it, "chat", inputs), inputs)[name] for it in (blind, sighted))
    assert 220 * MIB <= other.compute_bytes - one.compute_bytes <= 240 * MIB


def test_a_small_board_limits_images_and_a_large_one_does_not() -> None:
    it = seeing(projector_of(header("qwen2.5vl_merger", **QWEN)))
    small, large = (images_of(it, Preset(), "on", room, ABLE) for room in (6 * GIB, 48 * GIB))
    assert small and small.max_tokens and 512 < small.max_tokens < 4096 and small.compute_bytes <= 6 * GIB // 8
    assert large and large.max_tokens is None and large.compute_bytes == it.file.projector.compute_bytes()  # type: ignore[union-attr]
    tiny = images_of(it, Preset(), "on", 64 * MIB, ABLE)
    assert tiny and tiny.max_tokens == 256, "less than that no picture is read with"
    fixed = images_of(seeing(projector_of(header("gemma3", **SIGLIP))), Preset(), "on", GIB, ABLE)
    assert fixed and fixed.max_tokens is None, "its images have one size"
    own = images_of(it, Preset(args=("--image-max-tokens", "700")), "on", 6 * GIB, ABLE)
    assert own and own.max_tokens is None, "the operator's option is in args already"
    assert own.compute_bytes == it.file.projector.compute_bytes(700)  # type: ignore[union-attr]
    assert images_of(seeing(None), Preset(), "on", GIB, ABLE) is None


def test_more_memory_never_costs_more_than_it_adds() -> None:
    it = seeing(projector_of(header("qwen2.5vl_merger", **QWEN)))
    left = 0
    for room in range(2 * GIB, 40 * GIB, 256 * MIB):
        found = images_of(it, Preset(), "on", room, ABLE)
        assert found and room - found.compute_bytes > left
        left = room - found.compute_bytes


@pytest.mark.parametrize(
    "board", [shapes.jetson(64), shapes.cpu_board(64), shapes.gpu_board(64)], ids=["orin", "cpu", "gpu"]
)
def test_more_memory_never_means_less_context_beside_a_projector(board: shapes.Board) -> None:
    inputs = situation(board, shapes.memory(board), replace(ABLE, cuda=bool(board.gpus)), "1GiB", {})
    preset = Preset(n_ctx=32768, n_ctx_min=2048, offload="full" if board.gpus else "none", cache_ram=0)
    it = seeing(projector_of(header("qwen2.5vl_merger", **QWEN)))
    contexts, largest = [], []
    for quarters in range(16, 240, 3):
        free = {name: quarters * GIB // 4 + inputs.reserve_bytes[name] for name in inputs.available_bytes}
        rungs = walk_ladder(preset, [it], "chat", replace(inputs, available_bytes=free))
        first = next((rung.settings for rung in rungs if rung.fits), None)
        contexts.append(first.n_ctx // first.n_parallel if first else 0)
        largest.append(first.images.compute_bytes if first and first.images else 0)
    assert contexts == sorted(contexts) and contexts[-1] == 32768 and largest == sorted(largest)


def test_without_flash_attention_the_scores_are_counted() -> None:
    it = projector_of(header("gemma3", **SIGLIP, attention__head_count=16))
    assert it.compute_bytes(flash_attention=False) - it.compute_bytes() == 4096 * 4096 * 16 * 4


@pytest.mark.parametrize("able", [True, False])
def test_the_limit_is_told_to_an_engine_that_has_it(able: bool) -> None:
    """One that lacks the option takes images of any size, and is planned with the largest."""
    board, engine = shapes.jetson(7.4), replace(ABLE, cuda=True) if able else shapes.engine(cuda=True)
    inputs = situation(board, shapes.memory(board), engine, "1GiB", {})
    it = seeing(projector_of(header("qwen2.5vl_merger", **QWEN)))
    chosen = settings(Preset(offload="full"), LadderStep(4096, 1, "f16", "f16"), it, "chat", inputs)
    assert chosen.images is not None and (chosen.images.max_tokens is not None) == able
    assert (chosen.images.compute_bytes < GIB) == able
    assert ("--image-max-tokens" in render(chosen, engine, it.file, "m").args) == able
    limit = chosen.images.max_tokens
    assert common_params(chosen, it.file, "m").get("image_max_tokens") == limit


def test_a_start_without_an_image_says_nothing_about_the_projector() -> None:
    """The factor on the compute estimate fell with each start of a model with a projector."""
    board = shapes.cpu_board()
    inputs = situation(board, shapes.memory(board), shapes.engine(), "1GiB", {})
    it = seeing(projector_of(header("gemma3", **SIGLIP)))
    chosen = settings(Preset(offload="none"), LadderStep(4096, 1, "f16", "f16"), it, "chat", inputs)
    domains = budget(it, chosen, inputs)
    assert chosen.images is not None
    alone = domains["host"].compute_bytes - chosen.images.compute_bytes
    log = [
        f"sched_reserve:        CPU compute buffer size = {alone / MIB:.2f} MiB",
        "reserve_compute_meta:        CPU compute buffer size =   121.25 MiB",
    ]
    after = calibrate(Calibration(), LaunchPlan(0, chosen, domains, (), {}), measure("m", log))
    assert after.compute_factors == pytest.approx((1.0,), abs=0.01)


@contextmanager
def engine(folder: Path, name: str, side: int, limit: int | None, flash: str) -> Iterator[tuple[Path, Projector]]:
    bare = {"tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}  # no token behind it
    model = folder / "m.gguf"
    model.write_bytes(b"".join(tiny_model(Shape(n_ctx_train=4096), texts=bare)))
    path = write_projector(folder / "mmproj-m.gguf", name, 128)
    params: dict[str, Any] = {"mmproj.path": str(path), "verbosity": 4, "n_parallel": 1, "n_ctx": 4096}
    params |= {"image_max_tokens": limit} if limit else {}
    params |= {"flash_attn_type": 1 if flash == "on" else 0}
    with real_engine(model, folder / "e.sock", **params):
        yield folder / "e.sock", projector_of(read_header(path))


def ask(sock: Path, side: int) -> None:
    """Send one image."""
    url = "data:image/png;base64," + base64.b64encode(warmup.grey_png(side)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Hello"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    with closing(http.client.HTTPConnection("localhost", timeout=300)) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(300)
        connection.sock.connect(str(sock))
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()


def allocated(sock: Path) -> list[float]:
    """Return the MiB that the log names, once it does: a thread of the engine writes it."""

    def sizes() -> list[float]:
        return [float(size) for size in _BUFFER.findall(sock.with_suffix(".log").read_text(errors="replace"))]

    return eventually(sizes, "the log names the buffer")


# The images stay small, so that two slow cores compute them: the buffers grow with the patches alike.
CASES = [
    ("clip", 64, None, "on"),
    ("clip", 64, None, "off"),
    ("qwen2vl", 900, 256, "on"),
    ("qwen2vl", 900, 256, "off"),
    ("qwen2.5vl", 900, 256, "on"),
    ("qwen2.5vl", 900, 256, "off"),
    ("qwen3vl", 900, 256, "on"),
]


@pytest.mark.parametrize(("name", "side", "limit", "flash"), CASES)
def test_a_real_engine_takes_no_more_for_an_image_than_was_planned(
    tmp_path: Path, name: str, side: int, limit: int | None, flash: str
) -> None:
    assert name in SHAPES
    with engine(tmp_path, name, side, limit, flash) as (sock, projector):
        assert not _BUFFER.search(sock.with_suffix(".log").read_text(errors="replace")), (
            "nothing before the first image"
        )
        ask(sock, side)
        sizes = allocated(sock)
    planned = projector.compute_bytes(limit, flash_attention=flash == "on") / MIB
    assert sizes and max(sizes) <= planned <= 2.2 * max(sizes), (sizes, planned)


async def test_the_warm_up_sends_an_image_so_that_no_client_pays_for_the_first(tmp_path: Path) -> None:
    it = open_model(write_tiny_model(tmp_path / "t.gguf"))
    with engine(tmp_path, "clip", 64, None, "on") as (sock, projector):
        file = replace(it, mmproj="mmproj", projector=projector)
        images = images_of(candidate_of(file), Preset(), "on", 8 * GIB, ABLE)
        assert images is not None
        chosen = Settings(4096, 1, 0, "f16", "f16", "on", "mmap", 1, 0, images=replace(images, like_tokens=1))
        policy = Policy(idle_before_s=0, idle_set_s=300)
        warming = Warming(EngineClient(sock), chosen, True, SupervisorOptions(policy=policy))
        assert await warming.first() is None
        await asyncio.wait_for(warming.idle(Traffic()), 300)
        assert warmup.AN_IMAGE in warming.idle_done
        assert allocated(sock)


def test_an_image_that_would_keep_a_client_waiting_is_left_out() -> None:
    """On a CPU an image of 4096 patches takes half a minute, which the engine does not cancel."""
    names = [request.name for request in warmup.idle(replace(LARGE, n_ctx=1024), (), "", chat_template=True)]
    assert warmup.AN_IMAGE not in names, "the context is too small"
    sent = [each for each in warmup.idle(LARGE, (), "", chat_template=True) if each.name == warmup.AN_IMAGE]
    assert len(sent) == 1 and sent[0].prompt_tokens > 1000, "_idle_set compares it with the time that is left"


LARGE = Settings(8192, 1, 0, "f16", "f16", "on", "mmap", 1, 0)
LARGE = replace(
    LARGE, images=images_of(seeing(projector_of(header("gemma3", **SIGLIP))), Preset(), "on", 8 * GIB, ABLE)
)
