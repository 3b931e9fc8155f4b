"""Quant names in file names, and ids from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.models.catalogue import CatalogueQuant
from edge.models.open import open_model
from edge.models.pick import QuantOption, RemoteFile, choose
from edge.models.quant import (
    FILE_TYPES,
    UNKNOWN,
    QuantPreference,
    canonical,
    confirms,
    file_type_label,
    label_from_name,
    matching,
    order,
    public_name,
    select,
    shard_of,
)
from tests.fakes.gguf_writer import Gguf


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen3-4B-Instruct-2507-Q5_K_M.gguf", "Q5_K_M"),
        ("qwen3-4b-instruct-2507-q8_0.gguf", "Q8_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Phi-4-mini-instruct.Q8_0.gguf", "Q8_0"),
        ("Qwen3.6-35B-A3B-UD-Q4_K_M.gguf", "UD-Q4_K_M"),
        ("Qwen3.6-35B-A3B-ud-q4_k_xl.gguf", "UD-Q4_K_XL"),
        ("Qwen3.5-9B-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4"),
        ("model-F32-Q2_K.gguf", "Q2_K"),
        ("model-Q8_0-Q4_K_S.gguf", "Q4_K_S"),
        ("model-Q4_K_M-imat.gguf", "Q4_K_M"),
        ("model.i1-IQ3_XS.gguf", "IQ3_XS"),
        ("model-IQ4_NL.gguf", "IQ4_NL"),
        ("model-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("model-TQ1_0.gguf", "TQ1_0"),
        ("model-Q6_K_L.gguf", "Q6_K_L"),
        ("model-fp16.gguf", "F16"),
        ("model_bf16.gguf", "BF16"),
        ("my model Q5_K_M (copy).gguf", "Q5_K_M"),
        ("Q4_K_M/Qwen3.5-122B-A10B-00001-of-00003.gguf", "Q4_K_M"),
        ("Q4_K_M/Qwen3.5-122B-A10B-Q8_0-00001-of-00003.gguf", "Q8_0"),
        ("/models/BF16/Llama.gguf", "BF16"),
        ("apex-I-Compact.gguf", UNKNOWN),
        ("model-60%.gguf", UNKNOWN),
        ("model-Q4.gguf", UNKNOWN),
        ("Qwen3-4B.gguf", UNKNOWN),
        ("notaQ4_K_Model.gguf", UNKNOWN),
    ],
)
def test_fc58_labels_from_names(name: str, label: str) -> None:
    """FC-58: the longest tag, the last of two, the folder's when the file has none; unknown instead of a guess."""
    assert label_from_name(name) == label


@pytest.mark.parametrize("label", sorted(set(FILE_TYPES.values())))
def test_fc58_every_mix_is_recognised_in_any_case(label: str) -> None:
    for name in (f"m-{label}.gguf", f"m.{label.lower()}.gguf", f"{label}/m-00002-of-00004.gguf", f"a b {label}.gguf"):
        assert label_from_name(name) == label


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/x/Qwen3-4B-Instruct-2507-Q5_K_M.gguf", "Qwen3-4B-Instruct-2507"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen3.6-35B-A3B-UD-Q4_K_M.gguf", "Qwen3.6-35B-A3B"),
        ("gpt-oss-120b-mxfp4-00001-of-00003.gguf", "gpt-oss-120b"),
        ("my model Q5_K_M.gguf", "my-model"),
        ("a:b-Q4_0.GGUF", "a-b"),
        ("Phi/Q4_K_M.gguf", "Phi"),
        ("Q4_K_M.gguf", "model"),
        ("model-Q4_K_M-imat.gguf", "model-imat"),
    ],
)
def test_public_names(path: str, name: str) -> None:
    """No folder, no quant, nothing that a URL or `NAME:QUANT` would trip over."""
    assert public_name(path) == name


def test_shards_by_name() -> None:
    assert shard_of("m-00002-of-00005") == (2, 5)
    assert shard_of("m-2-of-5") is None
    assert shard_of("m-00002-of-00005-copy") is None


def test_file_type_numbers() -> None:
    assert file_type_label(17) == "Q5_K_M"
    assert file_type_label(1024 + 17) == "Q5_K_M"  # "guessed" is a flag
    assert file_type_label(999) == UNKNOWN
    assert file_type_label(None) == UNKNOWN
    assert canonical("fp16") == "F16"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_name_gives_some_label_and_id(name: str) -> None:
    label = label_from_name(name)
    assert (label and label == label.upper()) or label == UNKNOWN
    public = public_name(name + ".gguf")
    assert public and ":" not in public and "/" not in public and not any(c.isspace() for c in public)


def options_of(*sizes: tuple[str, int]) -> list[QuantOption]:
    return [QuantOption(quant, (RemoteFile(f"m-{quant}.gguf", size),)) for quant, size in sizes]


REPOSITORY = options_of(
    *(("UD-Q2_K_XL", 20), ("Q4_0", 40), ("UD-Q4_K_XL", 44), ("Q4_K_M", 42), ("Q5_1", 56), ("Q6_K", 60), ("BF16", 160))
)


@pytest.mark.parametrize(
    ("room", "quant"), [(None, "UD-Q4_K_XL"), (43, "Q4_K_M"), (41, "Q4_0"), (39, "UD-Q2_K_XL"), (19, None)]
)
def test_without_the_preferred_quantization_the_largest_smaller_one_that_fits_is_taken(
    room: int | None, quant: str | None
) -> None:
    without_legacy = [one for one in REPOSITORY if one.quant != "Q5_1"]
    found = select(without_legacy, QuantPreference(), room)
    assert (found.quant if found else None) == quant


def test_larger_quantizations_come_before_those_under_four_bits() -> None:
    few = options_of(("Q2_K", 20), ("Q3_K_L", 30), ("Q6_K", 60), ("Q8_0", 80), ("unknown", 50))
    assert [one.quant for one in order(few)] == ["Q6_K", "Q8_0", "Q3_K_L", "Q2_K", "unknown"]
    assert [one.quant for one in order(few, QuantPreference(prefer="quality"))][:2] == ["Q8_0", "Q6_K"]


def test_pull_and_up_choose_by_one_rule() -> None:
    """`model pull` decides over a repository's files, `up` over files and catalogue rows: same sizes, same answer."""
    rows = [CatalogueQuant(one.quant, (), one.bytes, True, "", "") for one in REPOSITORY]
    for wanted in (QuantPreference(), QuantPreference("Q8_0"), QuantPreference("Q4_K_M", "quality")):
        for room in (None, 170, 100, 58, 45, 41, 25):
            pulled = choose(REPOSITORY, "owner/repo", None, room, wanted).option.quant
            planned = select(rows, wanted, room)
            assert planned is not None and planned.quant == pulled


def test_a_tag_names_the_publishers_variant_after_the_exact_one() -> None:
    both = options_of(("UD-Q4_K_M", 45), ("Q4_K_M", 42), ("Q4_K_S", 40))
    assert [one.quant for one in matching(both, "q4_k_m")] == ["Q4_K_M", "UD-Q4_K_M"]
    assert [one.quant for one in matching(both, "ud-q4_k_m")] == ["UD-Q4_K_M"]


@pytest.mark.parametrize(
    ("label", "weights", "confirmed"),
    [
        ("Q4_K_S", {"Q2_K": 900, "Q4_K": 100}, False),  # one Q4_K matrix among 2-bit tensors
        ("Q4_K_M", {"Q4_K": 800, "Q6_K": 200}, True),
        ("Q3_K_L", {"Q3_K": 425, "Q5_K": 432}, True),  # llama-quantize's own mix of a 7B model
        ("Q5_K_M", {"Q5_1": 166, "Q8_0": 15, "Q6_K": 14, "Q5_K": 16}, True),  # rows of 576: fallback types
        ("Q4_K_S", {"Q2_K": 667, "Q4_K": 333}, False),  # a third of the bytes, but not the label's bits per weight
        ("UD-Q2_K_XL", {"Q2_K": 500, "Q3_K": 400, "Q4_K": 100}, True),
        ("Q8_0", {"Q4_K": 10, "TYPE99": 90}, False),
    ],
)
def test_a_label_needs_a_share_of_the_bytes(label: str, weights: dict[str, int], confirmed: bool) -> None:
    assert confirms(label, weights) is confirmed


@pytest.mark.parametrize(
    ("name", "file_type", "base", "one", "quant", "doubt"),
    [
        ("m-Q2_K", 10, "Q2_K", "Q4_K", "Q2_K", None),
        ("m", 14, "Q2_K", "Q4_K", "Q2_K", None),
        ("m-Q4_K_S", 14, "Q2_K", "Q4_K", "Q2_K", "its name has Q4_K_S, its tensors are Q2_K"),
        ("m-Q2_K", 14, "Q4_K", "Q2_K", "Q4_K_S", "its name has Q2_K, its tensors are Q4_K_S"),
        ("m-Q4_K_M", 15, "Q4_K", "Q6_K", "Q4_K_M", None),
        ("m-UD-Q2_K_XL", 10, "Q2_K", "Q4_K", "UD-Q2_K_XL", None),
    ],
)
def test_a_file_is_labelled_by_the_share_of_its_bytes(
    tmp_path: Path, name: str, file_type: int, base: str, one: str, quant: str, doubt: str | None
) -> None:
    """A file of 2-bit tensors with one Q4_K matrix was listed as Q4_K_S."""
    gguf = Gguf("llama").model(n_layer=4, type=base, file_type=file_type)
    gguf.tensor("blk.0.attn_v.weight", 256, 256, type=one)
    model = open_model(gguf.save(tmp_path / f"{name}.gguf"))
    assert model.quant == quant
    assert [note.partition(";")[0] for note in model.notes] == ([doubt] if doubt else [])
