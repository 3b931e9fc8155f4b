"""Engine options as keys of a model and as `args`: rendered for both engines, checked against the engine's own help."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import xllamacpp
from msgspec.structs import replace

from edge.cli import main
from edge.config.values import CONFIG_KEYS, MODEL_KEYS, SETTINGS, Preset
from edge.engine import embedded
from edge.engine.engine import Engine, Flag
from edge.engine.output import parse_help
from edge.errors import ConfigError
from edge.plan.argv import render
from edge.plan.engine_args import EMBEDDED as ROWS
from edge.plan.engine_args import OWNED, check_args, embedded_name
from edge.plan.engine_options import engine_options
from edge.plan.ladder_steps import requested_slot_context
from edge.plan.plan import EngineOptions
from edge.plan.prepare import assumed_engine
from tests.fakes.gguf_writer import Gguf
from tests.plan import shapes
from tests.plan.test_plan_argv import FULL, MODEL

# Recorded from llama.cpp 0c1e57098.
HELP = (Path(__file__).resolve().parents[1] / "fakes" / "llama-server-help.txt").read_text(encoding="utf-8")
REAL = replace(shapes.engine(), flags=parse_help(HELP))
EMBEDDED = Engine("embedded", "embedded", "/usr/bin/python3", args=("-I", "/e/embedded.py"))

KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "chat_template_file": ("/t/chatml.jinja", ("--chat-template-file", "/t/chatml.jinja")),
    "chat_template_kwargs": ({"enable_thinking": False}, ("--chat-template-kwargs", '{"enable_thinking":false}')),
    "reasoning": ("off", ("--reasoning", "off")),
    "reasoning_budget": (256, ("--reasoning-budget", "256")),
    "temperature": (0.2, ("--temp", "0.2")),
    "top_p": (0.9, ("--top-p", "0.9")),
    "top_k": (20, ("--top-k", "20")),
    "min_p": (0.0, ("--min-p", "0")),
    "repeat_penalty": (1.1, ("--repeat-penalty", "1.1")),
    "presence_penalty": (0.5, ("--presence-penalty", "0.5")),
    "frequency_penalty": (-0.5, ("--frequency-penalty", "-0.5")),
    "pooling": ("mean", ("--pooling", "mean")),
    "lora": (("/l/a.gguf", "/l/b.gguf:0.5"), ("--lora", "/l/a.gguf", "--lora-scaled", "/l/b.gguf:0.5")),
    "rope_scaling": ("yarn", ("--rope-scaling", "yarn")),
    "rope_scale": (4.0, ("--rope-scale", "4")),
    "draft": ("/m/small.gguf", ("--spec-draft-model", "/m/small.gguf", "--spec-type", "draft-simple")),
    "speculation": ("ngram", ("--spec-type", "ngram-mod")),
    "args": (("--keep", "4", "--swa-full"), ("--keep", "4", "--swa-full")),
}


def options(engine: Engine, **values: Any) -> EngineOptions:
    return engine_options(replace(Preset(), **values), engine, {})


def apply(fields: Mapping[str, Any]) -> Any:
    """Apply the fields to a real CommonParams, as the embedded engine's process does."""
    params = xllamacpp.CommonParams()
    embedded.apply(xllamacpp, params, json.loads(json.dumps(fields)))
    return params


def test_no_thinking_is_a_budget_of_one_token() -> None:
    """llama.cpp counts the newline behind <think>, and with 0 takes it for the end that it should write."""
    assert options(REAL, reasoning_budget=0).args == ("--reasoning-budget", "1")
    assert options(EMBEDDED, reasoning_budget=0).params == {"sampling.reasoning_budget_tokens": 1}
    old = parse_help(OLD_HELP) | {"--reasoning-budget": Flag("--reasoning-budget", 1)}
    assert options(replace(REAL, flags=old), reasoning_budget=0).args == ("--reasoning-budget", "0"), "the only switch"
    limited = options(replace(REAL, flags=old), reasoning_budget=256)
    assert limited.args == (), "it would not start"
    assert limited.unknown == ("reasoning_budget has no effect: this engine has no --reasoning-budget N",)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_reaches_llama_server(key: str) -> None:
    value, words = KEYS[key]
    found = options(REAL, **{key: value})
    assert found.args == words and found.unknown == ()
    line = render(FULL, REAL, MODEL, "chat", found)
    assert line.args[-len(words) :] == words, "behind the plan's own options"
    assert [reason.subject for reason in found.reasons] == [key]
    assert SETTINGS[key].read(list(value) if isinstance(value, tuple) else value) == value


@pytest.mark.parametrize("key", KEYS)
def test_each_key_reaches_the_embedded_engine(key: str, tmp_path: Path) -> None:
    value = KEYS[key][0]
    if key == "chat_template_file":
        value = str(tmp_path / "t.jinja")
        Path(value).write_text("{{ messages }}", encoding="utf-8")
    fields = options(EMBEDDED, **{key: value}).params
    assert fields, key
    changed, fresh = apply(fields), xllamacpp.CommonParams()
    for name in fields:
        theirs, ours = fresh, changed
        for part in {"chat_template_file": "chat_template"}.get(name, name).split("."):
            theirs, ours = getattr(theirs, part), getattr(ours, part)
        assert repr(theirs) != repr(ours), name


# Values that are no number, or where 0.25 and 7 would be the default.
_VALUES = {"--samplers": "top_k;temperature", "--reasoning-format": "deepseek-legacy", "--seed": "-2"}


@pytest.mark.parametrize("option", ROWS)
def test_each_option_of_args_reaches_the_embedded_engine(option: str) -> None:
    """By all its names in the help, as a value that CommonParams does not have by itself."""
    field, read = ROWS[option]
    flag = REAL.flags[option]
    names = [name for name, each in REAL.flags.items() if each.spelling == flag.spelling]
    value = () if isinstance(read, bool) else (_VALUES.get(option, "0.25" if read is float else "7"),)
    assert option in names and flag.arity == len(value)
    seen = set()
    for name in names:
        assert embedded_name(name) == option
        fields = options(EMBEDDED, args=(name, *value)).params
        assert fields.keys() - {"sampling.user_sampling_config"} == {field}
        found: Any = apply(fields)
        theirs: Any = xllamacpp.CommonParams()
        for part in field.split("."):
            found, theirs = getattr(found, part), getattr(theirs, part)
        assert found is read if isinstance(read, bool) else found != theirs, name
        seen.add(repr(found))
    assert len(seen) == 1


def test_options_of_args_keep_their_value_over_the_one_in_the_file() -> None:
    fields = options(EMBEDDED, args=("--mirostat", "2", "--samplers", "top_k", "--keep", "4"), top_k=3).params
    assert set(fields["sampling.user_sampling_config"]) == {"MIROSTAT", "SAMPLERS", "TOP_K"}


def test_a_random_seed_and_an_unknown_format() -> None:
    assert apply(options(EMBEDDED, args=("-s", "-1")).params).sampling.seed == 2**32 - 1
    with pytest.raises(ConfigError, match="--reasoning-format wants none or deepseek"):
        options(EMBEDDED, args=("--reasoning-format", "legacy"))


def test_nothing_set_is_nothing_rendered() -> None:
    assert engine_options(Preset(), REAL, {}) == EngineOptions()
    assert engine_options(Preset(), EMBEDDED, {}).params == {}


def test_thinking_can_be_switched_off_in_older_engines() -> None:
    older = replace(
        REAL, flags={name: flag for name, flag in REAL.flags.items() if name not in ("--reasoning", "-rea")}
    )
    assert options(older, reasoning="off").args == ("--reasoning-budget", "0")
    assert options(older, reasoning="on").unknown == ("reasoning has no effect: this engine has no --reasoning",)


# Before --spec-type, when -md alone drafted, and as it was before it had names for drafters.
OLD_HELP = "-md,   --model-draft FNAME              draft model for speculative decoding (default: unused)\n"
NGRAM_HELP = OLD_HELP + (
    "--spec-type [none|ngram-cache|ngram-simple|ngram-map-k|ngram-map-k4v|ngram-mod]\n"
    "                                        type of speculative decoding to use when no draft model is provided\n"
)


@pytest.mark.parametrize(
    ("text", "way", "lacking"),
    [
        (OLD_HELP, "ngram", "--spec-type"),
        (OLD_HELP, "mtp", "--spec-type"),
        (NGRAM_HELP, "ngram", None),
        (NGRAM_HELP, "mtp", "--spec-type draft-mtp"),
        (HELP, "mtp", None),
    ],
)
def test_an_engine_that_cannot_draft_so_is_named(text: str, way: str, lacking: str | None) -> None:
    engine = replace(REAL, flags=parse_help(text))
    for draft, path in (("", ()), ("/m/small.gguf", ("/m/small.gguf",))):
        found = options(engine, speculation=way, draft=draft)
        (reason,) = (each for each in found.reasons if each.subject == "speculation")
        assert ("--spec-type" in found.args) == (lacking is None)
        assert found.args[1:2] == path or not draft
        if lacking is None:
            assert found.unknown == () and reason.because == "as requested"
        else:
            assert found.unknown == (f"speculation has no effect: this engine has no {lacking}",)
            assert reason.because == f"no effect: this engine has no {lacking}"


@pytest.mark.parametrize("engine", [REAL, EMBEDDED], ids=["llama-server", "embedded"])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kepe", "4"), "did you mean --keep?"),
        (("--keep",), "args: --keep wants 1 value"),
        (("--ctx-size", "4096"), "args: --ctx-size is decided by edgellm"),
        (("--api-key", "x"), "args: --api-key is decided by edgellm"),
        (("--tools", "all"), "args: --tools is refused: it lets clients run programs"),
        (("--help",), "args: --help is refused: it prints and exits"),
        (("--swa-full", "7"), "7"),
        (("--keep=4",), "did you mean --keep?"),
        (("--xtc-probabilty", "0.1"), "did you mean --xtc-probability?"),
        (("keep", "4"), "keep"),
        (("--keep", "--swa-full"), "--swa-full"),
        (("--seed", "-1", "-2"), "-2"),
        (("--ctx_size", "4096"), "--ctx_size"),
        (("--",), "--"),
    ],
)
def test_what_cannot_be_an_option_is_refused(engine: Engine, args: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(engine, args=args)
    assert said in str(caught.value)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-ncmoe", "4"), "computes on the CPU alone"),
        (("--no-op-offload",), "computes on the CPU alone"),
        (("-nkvo",), "computes on the CPU alone"),
        (("-dt", "0.1"), "defragments no KV cache"),
    ],
)
def test_what_this_build_would_ignore_is_refused(words: tuple[str, ...], said: str) -> None:
    build = replace(REAL, cuda=False, devices=())
    with pytest.raises(ConfigError, match="has no effect") as caught:
        check_args(words, build)
    assert said in str(caught.value)
    if "CPU" in said:
        assert check_args(words, replace(build, cuda=True))


@pytest.mark.parametrize(
    "word", ["-c", "-ngl", "--gpu-layers", "-ot", "--no-mmproj", "--no-webui", "-np", "-no-kvu", "--no-jinja"]
)
def test_every_name_of_an_owned_option_is_owned(word: str) -> None:
    with pytest.raises(ConfigError, match="is decided by edgellm"):
        check_args((word, "1"), REAL)


@pytest.mark.parametrize("kind", ["llama-server", "embedded", "not built yet"])
def test_presets_of_llama_cpp_are_refused(kind: str) -> None:
    """They set a model, its context and a port, which the plan decides, or fetch weights."""
    assumed = assumed_engine(shapes.jetson(8), "orin", "/e/llama-server")
    engine = {"llama-server": REAL, "embedded": EMBEDDED}.get(kind, assumed)
    named = set(re.findall(r"^(--[a-z0-9.-]+-default)\b", HELP, re.MULTILINE))
    fetching = set(re.findall(r"^(--[a-z0-9.-]+)(?=(?:(?!^--).)*?weights from the\s+internet)", HELP, re.M | re.S))
    assert len(named) >= 10 and {"--fim-qwen-7b-spec", "--fim-qwen-1.5b-default"} <= fetching <= REAL.flags.keys()
    for name in named | fetching:
        with pytest.raises(ConfigError, match=f"^args: {name} is decided by edgellm") as caught:
            check_args((name,), engine)
        assert caught.value.hint in ("instead: ref in [[model]], or -m", "instead: speculation"), name


@pytest.mark.parametrize("kind", ["embedded", "not built yet"])
def test_every_name_of_an_owned_option_is_owned_without_a_help(kind: str) -> None:
    """The embedded engine prints none, and that of an engine which is not built is not known."""
    engine = EMBEDDED if kind == "embedded" else assumed_engine(shapes.jetson(8), "orin", "/e/llama-server")
    names = {REAL.flags[name].spelling for name in OWNED if name in REAL.flags}
    every = [name for name, flag in REAL.flags.items() if flag.spelling in names]
    assert len(every) > 100
    for name in every:
        with pytest.raises(ConfigError, match="is decided by edgellm"):
            check_args((name, "1"), engine)


@pytest.mark.parametrize(("word", "key"), [("--temp", "temperature"), ("--top-k", "top_k"), ("--min-p", "min_p")])
def test_what_is_a_key_of_the_embedded_engine_is_named(word: str, key: str) -> None:
    assert key in SETTINGS
    with pytest.raises(ConfigError) as caught:
        options(EMBEDDED, args=(word, "1"))
    assert caught.value.hint == f"instead: {key}"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--seed", "-1"), [("--seed", ("-1",))]),
        (("-s", "-1", "--keep", "-1"), [("-s", ("-1",)), ("--keep", ("-1",))]),
        (("--keep", "4", "--keep", "8"), [("--keep", ("4",)), ("--keep", ("8",))]),
        (
            ("--control-vector-layer-range", "2", "9", "--swa-full"),
            [("--control-vector-layer-range", ("2", "9")), ("--swa-full", ())],
        ),
        (("-n", "5", "-sp"), [("-n", ("5",)), ("-sp", ())]),
    ],
    ids=["negative", "short", "repeated", "two values", "switch last"],
)
def test_options_are_split_by_how_many_values_they_take(
    words: tuple[str, ...], found: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert check_args(words, REAL) == found
    with pytest.raises(ConfigError, match=r"wants \d value|no option"):
        check_args((*words, "--control-vector-layer-range", "2"), REAL)


def test_of_a_repeated_option_the_last_counts_for_both_engines() -> None:
    """As in llama.cpp, which reads its options in their order."""
    words = ("--keep", "4", "--keep", "8", "--repack", "--no-repack")
    assert options(REAL, args=words).args == words
    assert options(EMBEDDED, args=words).params == {"n_keep": 8, "no_extra_bufts": True}


def test_an_option_that_another_era_has_is_refused_with_the_one_of_this() -> None:
    """--defrag-thold of 2025 is ignored now; --draft-max is listed, and only throws."""
    old = replace(
        REAL, flags=parse_help("--defrag-thold N       KV cache defragmentation threshold\n--keep N      x\n")
    )
    with pytest.raises(ConfigError, match="no option --mtmd-batch-max-tokens"):
        check_args(("--mtmd-batch-max-tokens", "4"), old)
    with pytest.raises(ConfigError, match="no option --draft-max"):
        check_args(("--draft-max", "4"), REAL)
    with pytest.raises(ConfigError, match="--no-mmap is decided by edgellm"):
        check_args(("--no-mmap",), REAL)


OLD_LORA = (
    "--lora FNAME                            path to LoRA adapter (can be repeated to use multiple adapters)\n"
    "--lora-scaled FNAME SCALE               path to LoRA adapter with user defined scaling\n"
)


@pytest.mark.parametrize(
    ("entry", "new", "old"),
    [
        ("/l/a.gguf", ("--lora", "/l/a.gguf"), ("--lora", "/l/a.gguf")),
        ("/l/a.gguf:0.5", ("--lora-scaled", "/l/a.gguf:0.5"), ("--lora-scaled", "/l/a.gguf", "0.5")),
        ("/l/a.gguf:-1", ("--lora-scaled", "/l/a.gguf:-1"), ("--lora-scaled", "/l/a.gguf", "-1")),
        ("/l/a,b.gguf", ("--lora", '"/l/a,b.gguf"'), ("--lora", "/l/a,b.gguf")),
        ("/l/a,b.gguf:2", ("--lora-scaled", '"/l/a,b.gguf:2"'), ("--lora-scaled", "/l/a,b.gguf", "2")),
        ("/l/a:b.gguf", ("--lora", "/l/a:b.gguf"), ("--lora", "/l/a:b.gguf")),
        ("/l/a.gguf:nan", ("--lora", "/l/a.gguf:nan"), ("--lora", "/l/a.gguf:nan")),
    ],
)
def test_an_adapter_in_the_words_of_the_era(entry: str, new: tuple[str, ...], old: tuple[str, ...]) -> None:
    """Of older builds --lora-scaled takes two values; newer ones read lists, with quotes around a comma."""
    older = replace(REAL, flags=parse_help(OLD_LORA))
    assert older.flags["--lora-scaled"].arity == 2
    assert options(REAL, lora=(entry,)).args == new
    assert options(older, lora=(entry,)).args == old
    assert options(REAL, lora=(entry, "/l/z.gguf")).args == (*new, "--lora", "/l/z.gguf")
    (first, second) = options(EMBEDDED, lora=(entry, "/l/z.gguf:0.5")).params["lora_adapters"]
    assert first[0] == entry.removesuffix(":0.5").removesuffix(":-1").removesuffix(":2") and second == [
        "/l/z.gguf",
        0.5,
    ]


def test_a_scale_behind_a_path_with_a_colon_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no scale for a path with a colon"):
        options(REAL, lora=("/l/a:b.gguf:0.5",))


@pytest.mark.parametrize("word", ["--no-host", "-nocb", "-nr"])
def test_a_switch_that_is_not_owned_passes(word: str) -> None:
    assert check_args((word,), REAL) == [(word, ())]


def test_owned_options_name_keys_and_commands_that_exist() -> None:
    keys = {*SETTINGS, *CONFIG_KEYS}
    for option, instead in OWNED.items():
        word = instead.removesuffix(", or -m").removesuffix(" in [[model]]").split(" and ")[0]
        known = word in {*keys, *MODEL_KEYS, "[[model]]", "[[device]]"}
        assert known or instead.startswith(("edgellm ", "nothing: ")), option


def test_rope_extends_the_context_that_can_be_asked_for() -> None:
    preset = replace(Preset(), n_ctx=1 << 20)
    assert requested_slot_context(preset, 8192) == 8192
    assert requested_slot_context(replace(preset, rope_scaling="yarn", rope_scale=4.0), 8192) == 32768


@pytest.fixture
def vision(tmp_path: Path) -> Path:
    """A model beside two projectors that could both be its own."""
    models = tmp_path / "data" / "models"
    model = Gguf("llama").model().save(models / "Eye-Q5_K_M.gguf")
    for name in ("mmproj-a-F16.gguf", "mmproj-b-F16.gguf"):
        Gguf("clip").projector(256).save(models / name)
    return model


def planned(model: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> tuple[int, str, str]:
    words = [word for setting in settings for word in ("--set", setting)]
    state = ["--state-dir", str(model.parents[2])]
    code = main(["plan", "-p", "cpu", "-m", str(model), "-v", *words, *state])
    return code, *capsys.readouterr()


def test_the_projector_is_a_choice(vision: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two candidates none is taken; the key mmproj names one, or none."""
    assert "mmproj.path" not in planned(vision, capsys)[1]
    named = vision.with_name("mmproj-b-F16.gguf")
    code, out, _ = planned(vision, capsys, f"mmproj={named}")
    assert code == 0 and f'"mmproj.path":"{named}"' in out
    assert re.search(r"GB, projector \d", out)
    code, out, _ = planned(vision, capsys, "mmproj=none")
    assert code == 0 and "mmproj" not in out
    code, _, err = planned(vision, capsys, "mmproj=/none.gguf")
    assert code == 78 and "mmproj: /none.gguf" in err
    code, _, err = planned(vision, capsys, f"mmproj={vision}")
    assert code == 65 and "not a projector" in err


def _adapter(arch: str = "llama", name: str = "blk.0.attn_q.weight", width: int = 256) -> Gguf:
    made = Gguf(arch).set("general.architecture", arch).set("general.type", "adapter").set("adapter.type", "lora")
    return made.tensor(f"{name}.lora_a", width, 1).tensor(f"{name}.lora_b", 1, width)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (_adapter(), None),
        (_adapter("qwen2"), "is an adapter for qwen2"),
        (_adapter(width=512), "blk.0.attn_q.weight has 256 values there and 512 in the adapter"),
        (_adapter(name="blk.99.attn_q.weight"), "it changes blk.99.attn_q.weight, which the model lacks"),
    ],
)
def test_an_adapter_is_compared_with_its_model(
    vision: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: Gguf, said: str | None
) -> None:
    path = adapter.save(tmp_path / "x-lora.gguf")
    code, out, err = planned(vision, capsys, f"lora={path}")
    if said is None:
        assert code == 0 and ", adapters " in out
    else:
        assert code == 78 and said in err


@pytest.mark.parametrize(("more", "fits"), [(0, True), (100, True), (200, False)])
def test_a_drafter_may_have_a_few_tokens_more(
    vision: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: int, fits: bool
) -> None:
    """llama.cpp's own limit is 128: special tokens of one family differ."""
    path = Gguf("llama").model(vocab=32 + more).save(tmp_path / "Draft-Q5_K_M.gguf")
    code, out, err = planned(vision, capsys, f"draft={path}")
    assert code == (0 if fits else 78)
    assert (", drafter " in out) if fits else ("has another vocabulary" in err)


def _made_for(arch: str, key: str, width: int) -> Gguf:
    """A drafter that reads hidden states of that width. Its header has a vocabulary only where it has tokens."""
    return Gguf(arch).model(n_layer=1, n_embd=width if key == "embedding_length" else 512).set(f"{arch}.{key}", width)


EAGLE = ("eagle3", "target_hidden_size")
DFLASH = ("dflash", "embedding_length")
ASSISTANT = ("gemma4-assistant", "embedding_length_out")


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [
        (_made_for(*EAGLE, 256), "draft-eagle3"),
        (_made_for(*EAGLE, 256).drop("tokenizer.ggml.tokens").drop("tokenizer.ggml.model"), "draft-eagle3"),
        (_made_for(*DFLASH, 256), "draft-dflash"),
        (_made_for(*DFLASH, 256).tensor("markov_w1.weight", 256, 1), "draft-dspark"),
        (_made_for(*ASSISTANT, 256).set("gemma4-assistant.nextn_predict_layers", 1), "draft-mtp"),
    ],
    ids=["eagle3", "eagle3-without-tokens", "dflash", "dspark", "assistant"],
)
def test_a_drafter_made_for_the_model_drafts_in_its_own_way(
    vision: Path, capsys: pytest.CaptureFixture[str], drafter: Gguf, kind: str
) -> None:
    path = drafter.save(vision.with_name("Head-Q5_K_M.gguf"))
    for ref in (str(path), "Head", "Head:Q5_K_M"):
        code, out, err = planned(vision, capsys, f"draft={ref}", "n_ctx=512")
        assert code == 0 and ", drafter " in out, err
        assert f'"speculative.draft.mparams.path":"{path}"' in out and f'"speculative.types":["{kind}"]' in out
    state = ["--state-dir", str(vision.parents[2]), "--json", "--set", f"draft={path}", "--set", "n_ctx=512"]
    assert main(["plan", "-p", "cpu", "-m", str(vision), *state]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"].values()
    assert model["model"]["drafter_bytes"] >= sum(tensor.size for tensor in drafter.tensors)


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (_made_for(*EAGLE, 512), "is made for a model with 512 values a token, and Eye has 256"),
        (_made_for(*DFLASH, 512), "is made for a model with 512 values a token, and Eye has 256"),
        (_made_for(*ASSISTANT, 512), "is made for a model with 512 values a token, and Eye has 256"),
        (_made_for(*EAGLE, 256).set("eagle3.target_layers", [0, 1, 3]), "reads layer 3 of its model, and Eye has 2"),
        (_made_for("new-assistant", "embedding_length_out", 256), "architecture new-assistant, which llama.cpp lacks"),
        (_made_for(*EAGLE, 256).set("eagle3.vocab_size", 4096), "has another vocabulary"),
    ],
)
def test_a_drafter_made_for_another_model_is_refused(
    vision: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: Gguf, said: str
) -> None:
    code, out, err = planned(vision, capsys, f"draft={drafter.save(tmp_path / 'Head-Q5_K_M.gguf')}")
    assert code == 78 and out == "" and said in err


@pytest.mark.parametrize("kind", ["draft-eagle3", "draft-dflash", "draft-dspark", "draft-mtp"])
def test_an_engine_has_to_know_how_a_drafter_drafts(kind: str) -> None:
    preset = replace(Preset(), draft="/m/head.gguf", speculation="ngram")
    found = engine_options(preset, REAL, {}, kind)
    assert found.args[-2:] == ("--spec-type", f"{kind},ngram-mod")
    for text, lacking in ((OLD_HELP, "--spec-type"), (NGRAM_HELP, f"--spec-type {kind}")):
        with pytest.raises(ConfigError, match=f"needs {lacking}, which this engine lacks"):
            engine_options(preset, replace(REAL, flags=parse_help(text)), {}, kind)


@pytest.mark.parametrize("selected", [False, True], ids=["named", "selected"])
def test_the_plan_shows_where_each_option_was_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], selected: bool
) -> None:
    """A drafter too, whose name the plan resolves to a path."""
    models, file = tmp_path / "data" / "models", tmp_path / "config" / "edgellm.toml"
    path = Gguf("llama").model().save(models / "Small-Q5_K_M.gguf")
    file.parent.mkdir()

    def origins(text: str, *words: str) -> dict[str, tuple[str, str]]:
        file.write_text(f"schema = 1\n{text}\n", encoding="utf-8")
        assert main(["plan", "-p", "cpu", "--json", "--state-dir", str(tmp_path), *words]) == 0
        (model,) = json.loads(capsys.readouterr().out)["models"].values()
        assert model["model"]["drafter_bytes"] > 0
        return {each["subject"]: (each["origin"], each["value"]) for each in model["ladder"][0]["reasons"]}

    named = () if selected else ("-m", str(path))
    flags = origins("", *named, "--set", "draft=Small", "--set", "top_k=3")
    assert flags["draft"] == ("--set", str(path)) and flags["top_k"] == ("--set", "3")
    shared = origins('[set]\ndraft = "Small"\nargs = ["--keep", "4"]', *named)
    assert shared["draft"] == (str(file), str(path)) and shared["args"] == (str(file), "--keep 4")
    own = origins('[[model]]\nid = "small"\nref = "Small"\ndraft = "Small"\nset = { top_k = 3 }', "--set", "top_p=0.5")
    table = f"{file}: model 1"
    assert own["draft"] == (table, str(path)) and own["top_k"] == (table, "3")
    assert own["top_p"] == ("--set", "0.5")


def test_a_setting_that_does_nothing_for_a_model_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of [[model]] stand over those of the command line, and a role may not read them."""
    models, file = tmp_path / "data" / "models", tmp_path / "config" / "edgellm.toml"
    Gguf("llama").model().save(models / "Small-Q5_K_M.gguf")
    file.parent.mkdir()

    def warned(table: str, *words: str) -> list[str]:
        file.write_text(f'schema = 1\n[[model]]\nid = "small"\nref = "Small"\n{table}\n', encoding="utf-8")
        assert main(["plan", "-p", "cpu", "--json", "--state-dir", str(tmp_path), *words]) == 0
        (model,) = json.loads(capsys.readouterr().out)["models"].values()
        return [each for each in model["warnings"] if "no effect" in each]

    own = f"{file}: model 1 sets its own"
    assert warned('args = ["--keep", 4]', "--", "--keep", "8") == [
        f"args of the command line has no effect on this model: {own}"
    ]
    assert warned("set = { n_ctx = 256 }", "--set", "n_ctx=512", "--set", "top_k=3") == [
        f"n_ctx of --set has no effect on this model: {own}"
    ]
    assert warned("set = { n_ctx = 256 }", "--set", "n_ctx=256") == []
    assert warned('args = ["--keep", 4]') == warned("", "--", "--keep", "8") == []
    assert warned('set = { pooling = "mean" }') == [
        'pooling has no effect: the model chats; role = "embedding" in [[model]] serves embeddings'
    ]
    embeds = 'role = "embedding"\n'
    assert warned(embeds + 'set = { pooling = "mean", rope_scaling = "none" }', "--set", "top_k=3") == []
    assert warned(embeds + "set = { top_k = 3 }") == [
        "top_k has no effect: the model does not chat, its role is embedding"
    ]


# Needs a file, the network, a device or a privilege, or reads them by its value.
_NEEDS = re.compile(
    "file|path|dir|url|repo|host|port|device|rpc|hf|cache|lookup|mask|range|numa|prio|vector|grammar|schema|mmproj|media"
    "|model|lora|tensor|draft|spec-|mtmd|video|image|sse|timeout|override|tags|reverse|logit|samplers|moe|ffn|poll|strict"
    "|cors"
)


def free_options() -> dict[str, tuple[str, ...]]:
    """By option: a value other than the default that the help names, or none for a switch, of those edgellm leaves."""
    found: dict[str, tuple[str, ...]] = {}
    for option in sorted({flag.spelling for flag in REAL.flags.values()}):
        flag = REAL.flags[option]
        text = re.search(rf"^(?:-[\w-]+, +)*{option}\b.*?(?=\n-|\n\n|\Z)", HELP, re.MULTILINE | re.DOTALL)
        assert text is not None, option
        try:
            check_args((option, *["1"] * flag.arity), REAL)
        except ConfigError:
            continue
        if _NEEDS.search(option) or flag.arity > 1:
            continue
        default = re.search(r"\(default:\s+'?(-?[\w.]*\w)", text[0])
        named = flag.values or re.findall(r"(-?[\d.]*\d) = \w", text[0])
        others = [each for each in named if default and each != default[1] and not _same(each, default[1])]
        if not flag.arity or others:
            found[option] = (others[-1],) if flag.arity else ()
    return found


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def drawn_options(count: int = 10) -> tuple[str, ...]:
    """Switches, enumerations and numbers, drawn with a fixed seed, each by one of its names."""
    free, random_ = free_options(), random.Random(10)
    words: list[str] = []
    for option in random_.sample(sorted(free), count):
        names = sorted(name for name, flag in REAL.flags.items() if flag.spelling == option)
        words += (random_.choice(names), *free[option])
    return tuple(words)


def test_ten_options_that_edgellm_does_not_own_pass_through_unharmed() -> None:
    words = drawn_options()
    options_drawn = [word for word in words if word in REAL.flags]
    kinds = {(REAL.flags[word].arity, bool(REAL.flags[word].values)) for word in options_drawn}
    assert len(options_drawn) == 10 and kinds == {(0, False), (1, False), (1, True)}, words
    assert len(free_options()) > 25
    found = options(REAL, args=words)
    assert found.args == words and found.unknown == ()
    assert render(FULL, REAL, MODEL, "chat", found).args[-len(words) :] == words


def test_an_engine_that_is_not_built_yet_takes_the_keys_and_any_option_but_owned_ones() -> None:
    engine = assumed_engine(shapes.jetson(8), "orin", "/e/llama-server")
    for key, (value, words) in KEYS.items():
        found = options(engine, **{key: value})
        assert (found.args, found.unknown) == (words, ()), key
    assert options(engine, args=("--new-option", "1", "-2", "--other")).args == ("--new-option", "1", "-2", "--other")
    with pytest.raises(ConfigError, match="is decided by edgellm"):
        options(engine, args=("--ctx-size", "1"))
