"""The KV cache and recurrent state, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.models.meta import ModelMeta
from edge.plan.kv_cache import BLOCKS, cache_by_layer, checkpoint_bytes, memory_of, row_bytes, slot_context
from edge.plan.plan import Settings
from edge.units import MIB
from tests.plan.shapes import meta


def settings(n_ctx: int, slots: int = 1, kv: str = "f16", flash: str = "on", ubatch: int = 512) -> Settings:
    return Settings(n_ctx, slots, 0, kv, kv, flash, "mmap", 4, 0, n_ubatch=ubatch)


def cache(header: ModelMeta, chosen: Settings) -> int:
    return sum(cache_by_layer(memory_of(header), chosen))


def test_fc_22_the_trained_context_of_a_3b_model_is_fourteen_gib() -> None:
    """FC-22: 28 layers, 8 KV heads of 128, 131072 tokens in f16."""
    header = meta(layers=28, heads=24, kv_heads=8, head_size=128, ctx=131072)
    assert cache(header, settings(131072)) == 15_032_385_536


def test_fc_22_kv_heads_may_differ_by_layer_and_key_length_from_width() -> None:
    """FC-22: per-layer head counts, an explicit key length that is not width by heads."""
    header = meta(layers=4, embd=1000, heads=4, kv_heads=(4, 2, 0, 1), head_size=96)
    assert cache(header, settings(1024)) == 1024 * 2 * 2 * 96 * (4 + 2 + 0 + 1)


def test_fc_22_a_window_bounds_what_a_layer_keeps() -> None:
    """FC-22: Gemma 3, every sixth layer sees all 32768 tokens, the others 1024 and one batch."""
    header = meta("gemma3", layers=12, kv_heads=4, head_size=256, window=1024)
    row = 2 * 2 * 4 * 256
    assert cache(header, settings(32768)) == row * (2 * 32768 + 10 * 1536)
    assert cache(header, settings(1024)) == row * 12 * 1024  # no window is wider than the context


def test_a_pattern_in_the_file_wins() -> None:
    header = meta("gemma4", layers=4, kv_heads=1, window=512, arrays={"attention.sliding_window_pattern": (1, 1, 1, 0)})
    row = 2 * 2 * 128
    assert cache(header, settings(8192)) == row * (8192 + 3 * 1024)


def test_layers_that_share_a_cache_have_none_of_their_own() -> None:
    header = meta("gemma4", layers=4, kv_heads=1, extra={"attention.shared_kv_layers": 2})
    assert cache(header, settings(1024)) == 2 * 1024 * 2 * 2 * 128


def test_an_unknown_architecture_with_a_window_is_counted_in_full() -> None:
    """Phi-4-mini carries a window key that llama.cpp ignores."""
    header = meta("phi3", layers=2, kv_heads=8, window=2048)
    assert cache(header, settings(65536)) == 2 * 65536 * 2 * 2 * 8 * 128


def test_recurrent_layers_cost_by_slot_not_by_context() -> None:
    """Qwen3.5-27B: 64 layers, every fourth attends; 149.6 MiB of state a slot were reported (llama.cpp#20153)."""
    keys = {"ssm.state_size": 128, "ssm.inner_size": 6144, "ssm.conv_kernel": 4, "ssm.group_count": 16}
    header = meta("qwen35", layers=64, kv_heads=4, head_size=256, extra=keys)
    attention = 16 * 2 * 2 * 4 * 256
    for n_ctx, slots in ((8192, 1), (8192, 4), (32768, 4)):
        state = cache(header, settings(n_ctx, slots)) - n_ctx * attention
        assert state / slots / MIB == pytest.approx(149.6, abs=0.1)


def test_a_hybrid_that_names_its_attention_layers_by_head_counts() -> None:
    """LFM2 (convolutions) and Nemotron-H (feed-forward layers keep nothing)."""
    header = meta("lfm2", layers=3, embd=256, kv_heads=(0, 4, 0), head_size=64, extra={"shortconv.l_cache": 3})
    assert cache_by_layer(memory_of(header), settings(1024)) == (2048, 1024 * 2 * 2 * 4 * 64, 2048)
    keys = {"ssm.state_size": 16, "ssm.inner_size": 32, "ssm.conv_kernel": 1}
    mixed = meta("nemotron_h", layers=3, kv_heads=(0, 2, 0), arrays={"feed_forward_length": (0, 0, 8)}, extra=keys)
    assert [size > 0 for size in cache_by_layer(memory_of(mixed), settings(1024))] == [True, True, False]


def test_layers_for_further_tokens_are_not_run() -> None:
    header = meta(layers=5, kv_heads=1, extra={"nextn_predict_layers": 1})
    assert len(cache_by_layer(memory_of(header), settings(1024))) == 4


def test_without_flash_attention_v_is_as_wide_as_the_widest_layer() -> None:
    header = meta("deci", layers=2, kv_heads=(4, 1), head_size=64)
    assert cache(header, settings(1024, flash="on")) == 1024 * 2 * 2 * 64 * 5
    assert cache(header, settings(1024, flash="off")) == 1024 * 2 * 64 * (5 + 8)


def test_latent_attention_keeps_no_v() -> None:
    header = meta("deepseek2", layers=2, kv_heads=1, head_size=576, extra={"attention.key_length_mla": 192})
    assert cache(header, settings(1024)) == 2 * 1024 * 576 * 2


def test_a_checkpoint_is_what_cannot_be_rolled_back() -> None:
    plain = memory_of(meta(layers=4))
    assert not plain.needs_checkpoints
    assert checkpoint_bytes(plain, settings(4096)) == 0
    windowed = memory_of(meta("gemma3", layers=6, kv_heads=1, window=1024))
    assert windowed.needs_checkpoints
    assert checkpoint_bytes(windowed, settings(32768)) == 5 * 1536 * 2 * 2 * 128


@given(st.sampled_from(sorted(BLOCKS)), st.integers(1, 10_000))
def test_a_row_is_whole_blocks(kind: str, values: int) -> None:
    size, count = BLOCKS[kind]
    assert row_bytes(kind, values) % size == 0
    assert values <= row_bytes(kind, values) // size * count < values + count


@given(st.integers(1, 1 << 20), st.integers(1, 64))
def test_slots_get_whole_pages_of_the_context(n_ctx: int, slots: int) -> None:
    each = slot_context(n_ctx, slots)
    assert each % 256 == 0
    assert each >= max(1, n_ctx // slots)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown KV type"):
        row_bytes("q2_k", 32)
