"""What llama-server prints about itself, in every era (FC-28, FC-29)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine.engine import Device, Flag, era_of
from edge.engine.output import parse_devices, parse_help, parse_version
from edge.resources import data_dir, load_toml
from tests.fakes.toolchain.server import ERAS

_ERAS = load_toml(data_dir("build") / "llama-server.toml")["eras"]


@pytest.mark.parametrize("era", list(ERAS))
def test_fc28_the_era_is_read_from_help(era: str) -> None:
    assert era_of(parse_help(ERAS[era]), _ERAS) == era


def test_fc29_flash_attention_has_the_arity_that_help_shows() -> None:
    assert parse_help(ERAS["flash-bare"])["-fa"] == Flag("--flash-attn", 0)
    assert parse_help(ERAS["flash-value"])["-fa"] == Flag("--flash-attn", 1, ("on", "off", "auto"))


def test_names_values_and_descriptions_are_told_apart() -> None:
    flags = parse_help(
        """\
----- common params -----

-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        whether to enable KV cache offloading (default: enabled)
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        allowed values: f32, f16, q8_0
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
--control-vector-layer-range START END
                                        layer range
-l,    --logit-bias TOKEN_ID(+/-)BIAS   i.e. `--logit-bias 15043+1`
-sm,   --split-mode {none,layer,row}    how to split the model, one of:
                                        - none: use one GPU only
--cpu-strict <0|1>                      use strict CPU placement (default: 0)
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Values:
                                         - 0: generic output
                                         - 4: trace (more info)
"""
    )
    assert flags["--kv-offload"] == flags["-kvo"] == Flag("--kv-offload", 0)
    assert flags["-nkvo"].spelling == "--no-kv-offload"
    assert flags["-ctk"] == Flag("--cache-type-k", 1, ("f32", "f16", "q8_0"))
    assert flags["-ot"].arity == 1
    assert flags["--control-vector-layer-range"].arity == 2
    assert flags["-l"].arity == 1
    assert flags["-sm"].values == ("none", "layer", "row")
    assert flags["--cpu-strict"].values == ("0", "1")
    assert flags["-lv"] == Flag("--log-verbosity", 1, ("0", "4"))
    assert not {"--draft", "--draft-n", "--draft-max"} & set(flags), "a removed option only throws: it does not exist"


def test_help_of_2024_with_indented_names_and_repeated_hints() -> None:
    flags = parse_help(
        "  -m FNAME, --model FNAME      model path\n  -fa,      --flash-attn         enable Flash Attention\n"
    )
    assert flags["-m"] == flags["--model"] == Flag("--model", 1)
    assert flags["-fa"].arity == 0


_NAME = st.from_regex(r"--[a-z]{2,8}(-[a-z]{2,6})?", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(_NAME, st.sampled_from(["", "N", "FNAME", "[on|off]", "START END"]), min_size=1, max_size=8))
def test_whatever_llama_cpp_lists_is_found_with_its_arity(options: dict[str, str]) -> None:
    text = ""
    for name, hint in options.items():
        left = f"{name} {hint}".strip()
        # llama.cpp's printer: up to 37 columns beside the description, longer ones above it.
        text += f"{left:<40}what it does\n" if len(left) <= 37 else f"{left}\n{'':<40}what it does\n"
    flags = parse_help(text)
    assert {name: flag.arity for name, flag in flags.items()} == {n: len(h.split()) for n, h in options.items()}


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    parse_help(text)
    parse_version(text)
    parse_devices(text + "Available devices:\n" + text)


@pytest.mark.parametrize(
    ("text", "number", "commit"),
    [
        ("version: 0.5.0-dev (build 0, commit 0c1e57098)\nbuilt with GNU 12.2.0", "0.5.0-dev", "0c1e57098"),
        ("ggml_cuda_init: found 1 CUDA devices\nversion: 8762 (073bb2c20)\n", "8762", "073bb2c20"),
        ("version: 7770\nbuilt with GNU 11.4.0 for Linux aarch64\n", "7770", None),
        ("version: 0 (unknown)\n", "0", None),
    ],
)
def test_versions_of_all_eras(text: str, number: str, commit: str | None) -> None:
    version = parse_version(text)
    assert version is not None
    assert (version.number, version.commit) == (number, commit)


def test_devices() -> None:
    lines = ("  CUDA0: NVIDIA Thor (125809 MiB)", "  CUDA1: NVIDIA H200 (143155 MiB, 142629 MiB free)")
    text = "noise (1 MiB)\nAvailable devices:\n" + "\n".join(lines) + "\n"
    mib = 1024**2
    assert parse_devices(text) == (
        Device("CUDA0", "NVIDIA Thor", 125809 * mib, None),
        Device("CUDA1", "NVIDIA H200", 143155 * mib, 142629 * mib),
    )
    assert parse_devices("nothing") == ()
