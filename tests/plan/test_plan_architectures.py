"""The planner's tables against the pinned llama.cpp: what each architecture that it can load caches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge.models import projector
from edge.models.meta import ModelMeta
from edge.plan.kv_cache import ENCODERS, layers, state_values, window
from tests.plan import shapes
from tests.plan.architectures import KNOWN, PROJECTORS

ARCHITECTURES: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text())
LAYERS = 24
# Estimated by the general rule (every layer keeps the whole context), with what that leaves out.
BY_THE_GENERAL_RULE = {
    "deepseek4": "compressed and sparse caches of its own (llama-kv-cache-dsv4.cpp)",
    "dflash": "a drafter: it shares the cache layout of its target",
    "gemma4-assistant": "a drafter: its cross attention reads the target's cache",
    "t5": "an encoder and a decoder with caches of their own",
}


def meta(arch: str, **more: Any) -> ModelMeta:
    """exaone4 has windows with 64 layers only."""
    count = 64 if arch == "exaone4" else LAYERS
    return shapes.meta(arch, layers=count, embd=512, heads=8, kv_heads=2, head_size=64, ff=1024, **more)


def having(key: str, kind: type = object) -> list[str]:
    """Architectures whose rules have `key`, with a value of this kind."""
    return [name for name, rules in ARCHITECTURES.items() if rules.get(key) and isinstance(rules[key], kind)]


@pytest.mark.parametrize("arch", having("window", dict))
def test_windows_follow_the_pattern_of_the_source(arch: str) -> None:
    if arch in ENCODERS:
        return
    rule = ARCHITECTURES[arch]["window"]
    header = meta(arch, window=1024)
    assert window(header) > 0
    found = [layer.cells == "window" for layer in layers(header)]
    period = rule["period"]
    whole = [i % period == 0 if rule["whole_first"] else i % period == period - 1 for i in range(header.n_layer)]
    owners = [layer.cells != "none" for layer in layers(header)]
    assert [is_window for is_window, owns in zip(found, owners, strict=True) if owns] == [
        not each for each, owns in zip(whole, owners, strict=True) if owns
    ]


@pytest.mark.parametrize("arch", having("window", str))
def test_windows_follow_the_array_of_the_file(arch: str) -> None:
    """One that is shorter than the layers leaves the rest whole."""
    header = meta(arch, window=1024, arrays={"attention.sliding_window_pattern": (True, False, True)})
    assert [layer.cells for layer in layers(header)][:4] == ["window", "full", "window", "full"]
    assert {layer.cells for layer in layers(header)[3:]} == {"full"}


@pytest.mark.parametrize("arch", having("attends_every"))
def test_one_layer_in_so_many_attends(arch: str) -> None:
    every = ARCHITECTURES[arch]["attends_every"]
    extra = {"ssm.state_size": 64, "ssm.inner_size": 512, "ssm.conv_kernel": 4, "ssm.group_count": 4}
    header = meta(arch, extra=extra)
    assert [layer.recurrent for layer in layers(header)] == [(i + 1) % every != 0 for i in range(LAYERS)]


@pytest.mark.parametrize("arch", having("indexer"))
def test_an_indexer_adds_its_keys(arch: str) -> None:
    if arch in BY_THE_GENERAL_RULE:
        return
    plain, indexed = meta(arch), meta(arch, extra={"attention.indexer.key_length": 128})
    more = [with_keys.key - without.key for with_keys, without in zip(layers(indexed), layers(plain), strict=True)]
    assert set(more) == {128}


def test_kimi_keeps_a_matrix_a_head_and_three_convolutions() -> None:
    """llama-hparams.cpp, n_embd_r and n_embd_s: 32 heads of 128 and a kernel of 4."""
    header = shapes.meta(
        "kimi-linear", layers=4, heads=32, kv_heads=(0, 0, 0, 1), extra={"kda.head_dim": 128, "ssm.conv_kernel": 4}
    )
    assert state_values(header) == 3 * 3 * 4096 + 128 * 128 * 32
    assert [layer.recurrent for layer in layers(header)] == [True, True, True, False]


def test_every_other_rule_of_the_source_is_known() -> None:
    """An architecture of a newer pin with a rule of its own fails here until a table knows it."""
    keys = {key for rules in ARCHITECTURES.values() for key in rules}
    assert keys <= {"window", "attends_every", "recurrent", "indexer"}
    assert len(ARCHITECTURES) > 140
    assert set(BY_THE_GENERAL_RULE) <= set(ARCHITECTURES)


# Projectors whose largest image is in their header (image_max_pixels, preproc_image_size), fixed by the engine, or not
# an image at all; tools/mtmd/clip.cpp.
BY_HEADER = {"deepseek4v", "dots3note_v", "dots_ocr", "exaone4_5", "glm5v", "lightonocr", "mimovl", "paddleocr", "phi4"}
FIXED = ["deepseekocr", "deepseekocr2"]
SOUND = {
    "dots3note_a",
    "gemma4a",
    "gemma4ua",
    "glma",
    "granite_speech",
    "lfm2a",
    "meralion",
    "mimo_audio",
    "musicflamingo",
}
SOUND |= {"parakeet", "pockettts_gen", "pockettts_spkenc", "qwen2a", "qwen3a", "qwen3tts_gen", "qwen3tts_spkenc"}
SOUND |= {"ultravox", "voxtral"}


def test_every_projector_of_the_source_is_known() -> None:
    """One of a newer pin fails here until the size of its largest image is known."""
    limits = json.loads(PROJECTORS.read_text())
    assert len(limits) > 50
    for name, most in limits.items():
        if most is not None:
            assert projector._TOKENS[name][0] == most, name
        else:
            known = name in projector._TOKENS or name in projector._ONE_SIZE
            assert known or name in (*BY_HEADER, *FIXED, *SOUND), name
