"""Settings become the command line of each era, the fields of the embedded engine, and a clean environment."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import xllamacpp
from msgspec.structs import replace

from edge.engine import embedded
from edge.engine.engine import Engine
from edge.models.open import ModelFile
from edge.plan.argv import SOCKET, EnvFacts, common_params, environment, redacted, redacted_args, render
from edge.plan.plan import Settings
from edge.plan.prepare import assumed_engine
from tests.plan import shapes

FULL = Settings(
    n_ctx=8192,
    n_parallel=2,
    n_gpu_layers=33,
    kv_type_k="q8_0",
    kv_type_v="q8_0",
    flash_attention="on",
    load_mode="none",
    n_threads=6,
    cache_ram_bytes=128 * 1024**2,
    devices=("CUDA0",),
)
MODEL = shapes.model()
FACTS = EnvFacts("/home/e", "/cache")
ERAS = ("load-mode", "both", "flash-value", "flash-bare")


def argv(settings: Settings, engine: Engine, model: ModelFile, alias: str) -> tuple[str, ...]:
    return render(settings, engine, model, alias).args


def pairs(line: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(pairwise(line))


@pytest.mark.parametrize("era", ERAS)
def test_fc_28_only_options_that_the_engine_lists_are_given(era: str) -> None:
    """FC-28: --no-mmap is gone since September 2026 and ends the engine with an error; others are new."""
    engine = shapes.engine(cuda=True, era=era)
    line = argv(FULL, engine, MODEL, "chat")
    assert line[0] == engine.path
    assert [word for word in line[1:] if word.startswith("-") and word not in engine.flags] == []


@pytest.mark.parametrize(
    ("era", "mode", "wanted", "not_wanted"),
    [
        ("load-mode", "none", ["--load-mode", "none"], ["--no-mmap"]),
        ("load-mode", "mmap", ["--load-mode", "mmap"], []),
        ("load-mode", "dio", ["--load-mode", "dio"], ["--direct-io"]),
        ("both", "none", ["--load-mode", "none"], ["--no-mmap"]),
        ("flash-value", "none", ["--no-mmap"], ["--load-mode"]),
        ("flash-value", "dio", ["--direct-io"], ["--load-mode"]),
        ("flash-value", "mmap", [], ["--no-mmap", "--load-mode"]),
        ("flash-bare", "none", ["--no-mmap"], []),
        ("flash-bare", "dio", ["--no-mmap"], ["--direct-io"]),
    ],
)
def test_fc_28_the_load_mode_in_the_words_of_the_era(
    era: str, mode: str, wanted: list[str], not_wanted: list[str]
) -> None:
    """FC-28: "no mmap" is a policy with two spellings."""
    line = argv(replace(FULL, load_mode=mode), shapes.engine(era=era), MODEL, "chat")
    assert " ".join(wanted) in " ".join(line)
    assert not set(not_wanted) & set(line)


def test_flash_attention_with_a_value_and_without() -> None:
    assert ("--flash-attn", "on") in pairs(argv(FULL, shapes.engine(), MODEL, "chat"))
    bare = argv(FULL, shapes.engine(era="flash-bare"), MODEL, "chat")
    assert "--flash-attn" in bare
    assert ("--flash-attn", "on") not in pairs(bare)
    for value in ("off", "auto"):
        assert "--flash-attn" not in argv(
            replace(FULL, flash_attention=value), shapes.engine(era="flash-bare"), MODEL, "chat"
        )


def test_what_must_always_be_said() -> None:
    """FC-88: `--jinja` is among it, or tools are a 500. (What help does not list is left out: see above.)"""
    line = argv(FULL, shapes.engine(cuda=True), MODEL, "chat")
    assert pairs(line) >= {
        ("--model", MODEL.path),
        ("--alias", "chat"),
        ("--host", SOCKET),
        ("--ctx-size", "8192"),
        ("--parallel", "2"),
        ("--n-gpu-layers", "33"),
        ("--device", "CUDA0"),
        ("--fit", "off"),
        ("--cache-ram", "128"),
        ("--ctx-checkpoints", "0"),
        ("--flash-attn", "on"),
        ("--cache-type-k", "q8_0"),
        ("--cache-type-v", "q8_0"),
        ("--threads", "6"),
        ("--verbosity", "4"),
        ("--log-colors", "off"),
    }
    assert set(line) >= {"--offline", "--no-ui", "--no-warmup", "--slots", "--props", "--metrics", "--jinja"}
    assert line.count(SOCKET) == 1


@pytest.mark.parametrize(("era", "level"), [("load-mode", "4"), ("flash-value", "3"), ("flash-bare", None)])
def test_the_log_shows_stages_and_never_prompts(era: str, level: str | None) -> None:
    """The last level that --help lists prints what people said. Without levels the default has the stages."""
    line = argv(FULL, shapes.engine(era=era), MODEL, "chat")
    given = [value for name, value in pairs(line) if name in ("--verbosity", "-lv", "--log-verbosity")]
    assert given == ([level] if level else [])


def test_on_the_cpu_no_device_is_used() -> None:
    line = argv(replace(FULL, n_gpu_layers=0, devices=()), shapes.engine(), MODEL, "chat")
    assert pairs(line) >= {("--n-gpu-layers", "0"), ("--device", "none")}


def test_fc_29_what_an_engine_does_not_know_is_left_out_and_named() -> None:
    """FC-29: an unknown optional flag is a warning, not a crash."""
    line = render(FULL, shapes.engine(era="flash-bare"), MODEL, "chat")
    assert "--fit off: this engine does not know it" in line.dropped
    assert "--cache-ram 128: this engine does not know it" in line.dropped
    assert render(FULL, shapes.engine(cuda=True), MODEL, "chat").dropped == ()


def test_rerank_and_projector() -> None:
    ranking = argv(replace(FULL, role="rerank"), shapes.engine(), MODEL, "r")
    assert "--reranking" in ranking
    assert "--jinja" not in ranking
    seen = argv(replace(FULL, mmproj="/m/mmproj.gguf"), shapes.engine(), MODEL, "chat")
    assert ("--mmproj", "/m/mmproj.gguf") in pairs(seen)


def test_the_assumed_engine_knows_every_option_that_is_given() -> None:
    engine = assumed_engine(shapes.jetson(8), "orin", "/e/llama-server")
    assert (engine.cuda, engine.built_for) == (True, (87,))
    settings = replace(FULL, split_mode="layer", tensor_split=(1.0, 1.0), mmproj="/m/mmproj.gguf")
    assert render(settings, engine, MODEL, "chat").dropped == ()
    assert not assumed_engine(shapes.cpu_board(), "cpu", "/e").cuda


def test_fields_of_the_embedded_engine_are_fields() -> None:
    """The child applies them to a real CommonParams; an unknown one would be an error there."""
    engine = Engine("embedded", "embedded", "/usr/bin/python3", args=("-I", "/e/embedded.py"))
    line = argv(replace(FULL, n_gpu_layers=0, devices=()), engine, MODEL, "chat")
    assert line[:4] == ("/usr/bin/python3", "-I", "/e/embedded.py", "--params")
    assert line[5:] == ("--socket", SOCKET)
    for settings in (FULL, replace(FULL, role="rerank"), replace(FULL, load_mode="dio", mmproj="/m/p.gguf")):
        fields = json.loads(argv(settings, engine, MODEL, "chat")[4])
        assert fields == common_params(settings, MODEL, "chat")
        params = xllamacpp.CommonParams()
        embedded.apply(xllamacpp, params, fields)
        assert (params.n_ctx, params.n_parallel, params.fit_params) == (8192, 2, False)
        assert (params.model.path, params.cache_ram_mib) == (MODEL.path, 128)


def test_the_environment_is_built_never_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLAMA_ARG_* would undo the plan; with LLAMA_ARG_TOOLS=all a bare server runs shell commands."""
    monkeypatch.setenv("LLAMA_ARG_TOOLS", "all")
    monkeypatch.setenv("HF_TOKEN", "secret")
    env = environment(shapes.engine(), FACTS)
    assert env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/e",
        "LC_ALL": "C",
        "XDG_CACHE_HOME": "/cache",
        "LLAMA_CACHE": "/cache/llama.cpp",
        "GOMP_SPINCOUNT": "1000",
        "LLAMA_SERVER_ROUTER_PORT": "1",
    }


def test_cuda_gets_a_cache_that_survives_and_a_stable_order() -> None:
    env = environment(shapes.engine(cuda=True), FACTS, gpus=("GPU-b", "GPU-a"), managed_memory=True)
    assert env["CUDA_CACHE_PATH"] == "/cache/cuda"
    assert int(env["CUDA_CACHE_MAXSIZE"]) == 4 * 1024**3
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert env["GGML_CUDA_ENABLE_UNIFIED_MEMORY"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment(shapes.engine(cuda=True), FACTS)
    assert environment(shapes.engine(cuda=True), FACTS, gpus=())["CUDA_VISIBLE_DEVICES"] == ""
    # Any value switches managed memory on, "0" too: it may only be there when it is wanted.
    assert "GGML_CUDA_ENABLE_UNIFIED_MEMORY" not in environment(shapes.engine(cuda=True), FACTS)


def test_libraries_and_the_progress_protocol_follow_the_engine() -> None:
    engine = replace(shapes.engine(), library_path="/e/lib", progress_protocol=False)
    env = environment(engine, replace(FACTS, wsl=True))
    assert env["LD_LIBRARY_PATH"] == "/e/lib:/usr/lib/wsl/lib"
    assert "LLAMA_SERVER_ROUTER_PORT" not in env


def test_printing_hides_what_may_be_a_secret() -> None:
    shown = redacted({"HOME": "/home/e", "HF_TOKEN": "hf_abc", "LLAMA_API_KEY": "k"})
    assert shown == {"HF_TOKEN": "[hidden]", "HOME": "/home/e", "LLAMA_API_KEY": "[hidden]"}


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (("--keep", "4", "--image-max-tokens", "256"), ["--keep", "4", "--image-max-tokens", "256"]),
        (("--new-api-key", "k", "--keep", "4"), ["--new-api-key", "[hidden]", "--keep", "4"]),
        (("--auth-token", "-k", "--swa-full"), ["--auth-token", "[hidden]", "--swa-full"]),
        (("--proxy", "http://me:word@host/"), ["--proxy", "[hidden]"]),
        (("--proxy", "http://host/a@b"), ["--proxy", "http://host/a@b"]),
    ],
)
def test_args_are_kept_without_secrets(args: tuple[str, ...], kept: list[str]) -> None:
    assert redacted_args(args) == kept
