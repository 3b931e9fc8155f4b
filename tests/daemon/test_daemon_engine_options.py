"""Keys of the engine at work: the real embedded engine shows template, sampling, adapter and drafts."""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from edge.cli import main
from edge.plan import start_records
from edge.supervisor.warmup import grey_png
from tests.fakes.gguf_writer import Gguf
from tests.fakes.projectors import write_projector
from tests.plan.random_drafters import write_assistant, write_dflash, write_eagle3, write_gemma4
from tests.plan.random_gguf import Shape, write
from tests.plan.test_plan_engine_options import drawn_options
from tests.serving import PATIENCE_S, Up, edgellm, eventually
from tests.supervisor.test_supervisor_real_engines import with_template

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if quiet %}<quiet>{% endif %}<bot>"


@functools.cache
def first_query(model: Path) -> tuple[str, int, int]:
    """The architecture of a model and the size of its first query projection; reading a vocabulary takes a second."""
    reader = gguf.GGUFReader(model)
    arch = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    tensor = next(one for one in reader.tensors if one.name == "blk.0.attn_q.weight")
    n_in, n_out = (int(size) for size in tensor.shape)
    return arch, n_in, n_out


def adapter_of(model: Path, path: Path) -> Path:
    """A LoRA of rank 1 for the first query projection, with random values."""
    arch, n_in, n_out = first_query(model)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    random = np.random.default_rng(1)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", random.standard_normal((1, n_in)).astype(np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", random.standard_normal((n_out, 1)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def lora_for(arch: str, width: int) -> Gguf:
    """The header of an adapter for the first query projection of a model of that width."""
    made = Gguf(arch).set("general.type", "adapter").set("adapter.type", "lora")
    return made.tensor("blk.0.attn_q.weight.lora_a", width, 1).tensor("blk.0.attn_q.weight.lora_b", 1, width)


@pytest.mark.e2e
def test_keys_of_the_engine_are_at_work(tmp_path: Path, smollm2: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    lora = adapter_of(smollm2, tmp_path / "small-lora.gguf")
    second = adapter_of(smollm2, tmp_path / "second, larger-lora.gguf")
    config = tmp_path / "config" / "edgellm.toml"
    config.parent.mkdir()
    config.write_text(
        f"""schema = 1
[[model]]
id = "chat"
ref = "{smollm2}"
chat_template_file = "{template}"
lora = ["{lora}:0.25", "{second}:-0.125"]
args = ["--repeat-last-n", "32"]
[model.set]
n_ctx = 512
temperature = 0.125
top_k = 3
chat_template_kwargs = {{ quiet = true }}
speculation = "ngram"
""",
        encoding="utf-8",
    )
    with Up(tmp_path, "-p", "cpu") as up:
        up.wait_for("ok")
        props = httpx.get(f"{up.url}/props", timeout=PATIENCE_S).json()
        params = props["default_generation_settings"]["params"]
        assert params["temperature"] == 0.125 and params["top_k"] == 3 and params["repeat_last_n"] == 32
        assert props["chat_template"] == TEMPLATE
        adapters = httpx.get(f"{up.url}/lora-adapters", timeout=PATIENCE_S).json()
        assert [(one["path"], one["scale"]) for one in adapters] == [(str(lora), 0.25), (str(second), -0.125)]
        message = {"role": "user", "content": "one two three four " * 20}
        applied = httpx.post(f"{up.url}/apply-template", json={"messages": [message]}, timeout=PATIENCE_S).json()
        assert applied["prompt"].startswith("<user>one two") and applied["prompt"].endswith("<quiet><bot>")
        starts = up.state / "state" / "main" / "starts.jsonl"
        (start,) = eventually(lambda: start_records.read(starts), "the start is recorded")
        assert start["args"] == ["--repeat-last-n", "32"]
        # An answer that repeats its prompt, whatever the weights and the adapter: n-grams of it are drafted, and right.
        body = {"prompt": " one two three four" * 40, "grammar": 'root ::= " one two three four"+', "max_tokens": 96}
        answer = httpx.post(f"{up.url}/v1/completions", json={**body, "temperature": 0}, timeout=120).json()
        assert answer["timings"]["draft_n"] > 0 and answer["timings"]["draft_n_accepted"] > 0, answer


@pytest.mark.e2e
@pytest.mark.parametrize(("setting", "status"), [((), 200), (("--set", "ui=false"), 404)])
def test_llama_cpps_own_page_is_served_on_loopback(
    tmp_path: Path, smollm2: Path, setting: tuple[str, ...], status: int
) -> None:
    with Up(tmp_path, "-p", "cpu", "-m", f"chat={smollm2}", "--set", "n_ctx=512", *setting) as up:
        up.wait_for("ok")
        page = httpx.get(f"{up.url}/upstream/chat/", headers={"Accept": "text/html"}, timeout=30)
        assert page.status_code == status
        assert httpx.get(f"{up.url}/telemetry", timeout=30).json()["about"]["engine_page"] is (status == 200)
        (start,) = httpx.get(f"{up.url}/starts", timeout=30).json()["starts"]
        assert (start["model"], start["outcome"]) == ("chat", "ready") and str(smollm2) not in json.dumps(start)
        assert {"engine", "weights", "warm"} <= {span["name"] for span in start["spans"]}
        if status == 200:
            assert page.headers["content-type"].startswith("text/html") and "<script" in page.text


BROKEN = ["{% for m in messages %}{{ m.content }}", "{{ messages | nosuchfilter }}"]


@pytest.mark.e2e
@pytest.mark.parametrize("broken", BROKEN)
def test_a_template_that_the_engine_refuses_is_named_with_the_key_that_helps(
    tmp_path: Path, smollm2: Path, broken: str
) -> None:
    """Case 14: a template in the model's file. The hint names chat_template_file, with which the same model serves."""
    there = with_template(smollm2, tmp_path / "Odd-Q4_1.gguf", broken)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    place = ("-p", "cpu", "-m", f"chat={there.path}", "--set", "n_ctx=512")
    with Up(tmp_path / "broken", *place) as up:
        up.wait_for("failed")
        failure = up.status()["models"]["chat"]["failure"]
        assert failure["kind"] == "bad_model" and "chat_template_file" in failure["hint"], failure
    with Up(tmp_path / "healed", *place, "--set", f"chat_template_file={template}") as up:
        up.wait_for("ok")
        message = {"role": "user", "content": "one"}
        applied = httpx.post(f"{up.url}/apply-template", json={"messages": [message]}, timeout=PATIENCE_S).json()
        assert applied["prompt"] == "<user>one<bot>"
        assert up.chat().status_code == 200


@pytest.mark.e2e
@pytest.mark.parametrize("broken", BROKEN)
def test_a_chat_template_file_that_the_engine_refuses_starts_nothing(
    tmp_path: Path, smollm2: Path, broken: str
) -> None:
    """The engine judges it on a tiny model; one that it took is not asked for again."""
    template = tmp_path / "template.jinja"
    template.write_text(broken, encoding="utf-8")
    place = ("-p", "cpu", "-m", f"chat={smollm2}", "--set", "n_ctx=512", "--set", f"chat_template_file={template}")
    state = tmp_path / "state"
    done = edgellm("up", *place, "--state-dir", str(state), "--listen", "127.0.0.1:0", timeout=PATIENCE_S)
    assert done.returncode == 78 and f"chat_template_file: the engine refuses {template}: " in done.stderr, done.stderr
    assert "edgellm model check" in done.stderr and "loading" not in done.stdout + done.stderr
    assert not list(state.rglob("starts.jsonl")) and not list(state.rglob("crashes.jsonl"))
    template.write_text(TEMPLATE, encoding="utf-8")
    with Up(state, *place) as up:
        up.wait_for("ok")
        (kept,) = state.rglob("template_verdicts.json")
        before = kept.stat().st_mtime_ns
        template.write_text(broken, encoding="utf-8")
        reloaded = edgellm("reload", "--state-dir", str(state), timeout=PATIENCE_S)
        assert reloaded.returncode == 78 and "the engine refuses" in reloaded.stderr, reloaded.stderr
        template.write_text(TEMPLATE, encoding="utf-8")
        assert edgellm("reload", "--state-dir", str(state), timeout=PATIENCE_S).returncode == 0
        assert kept.stat().st_mtime_ns == before
        assert up.chat().status_code == 200


@pytest.mark.e2e
def test_a_remembered_launch_starts_no_template_that_was_changed(tmp_path: Path, smollm2: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    place = ("-p", "cpu", "-m", f"chat={smollm2}", "--set", "n_ctx=512", "--set", f"chat_template_file={template}")
    with Up(tmp_path / "state", *place) as up:
        up.wait_for("ok")
        eventually(lambda: list(up.state.rglob("launch.json")), "the launch is remembered")
        port = up.port
    template.write_text(BROKEN[0], encoding="utf-8")
    with Up(tmp_path / "state", *place, port=port) as up:  # the same command line
        assert up.process.wait(PATIENCE_S) == 78, up.output
        assert "the engine refuses" in up.output


@pytest.mark.full
def test_ten_options_of_the_real_help_pass_through(tmp_path: Path, smollm2: Path, built_server: Path) -> None:
    """llama-server itself takes them: drawn with a fixed seed from those that need no file, network or device."""
    place = ("-p", "cpu", "-m", f"chat={smollm2}", "--engine", str(built_server), "--set", "n_ctx=512")
    words = drawn_options()
    with Up(tmp_path, *place, "--", *words) as up:
        up.wait_for("ok")
        line = Path(f"/proc/{up.child_pid()}/cmdline").read_bytes().decode().split("\0")
        first = line.index(words[0])
        assert tuple(line[first : first + len(words)]) == words
        assert up.chat().status_code == 200


@pytest.mark.e2e
def test_what_args_cost_is_known_after_the_first_start(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --swa-full each layer keeps the whole context, and not its window."""
    layers, n_ctx, window = 7, 8192, 512
    shape = Shape(arch="gemma3", layers=layers, embd=128, heads=1, kv_heads=1, head_size=128, ff=128, window=window)
    model = write(tmp_path / "Window-F16.gguf", replace(shape, tied=True), smollm2)
    place = ("-p", "cpu", "-m", f"chat={model}", "--set", f"n_ctx={n_ctx}", "--set", 'args=["--swa-full"]')

    def planned() -> int:
        assert main(["plan", *place, "--json", "--state-dir", str(tmp_path)]) == 0
        (found,) = json.loads(capsys.readouterr().out)["models"].values()
        return int(found["ladder"][found["chosen"]]["memory"]["host"]["kv_bytes"])

    full = layers * n_ctx * 2 * 2 * 128  # K and V of one head in f16
    assert planned() < full / 2
    with Up(tmp_path, *place) as up:
        up.wait_for("ok")
        eventually((tmp_path / "state" / "calibration.json").exists, "the engine's memory is recorded")
    assert planned() == pytest.approx(full, rel=0.05)


@pytest.mark.e2e
def test_a_drafter_drafts(tmp_path: Path, smollm2: Path) -> None:
    """The model drafts for itself: nearly every token is accepted, and the answer is the same."""
    body = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24, "temperature": 0}
    answers = []
    for number, more in enumerate(((), ("--set", f"draft={smollm2}"))):
        with Up(tmp_path / str(number), "-p", "cpu", "-m", f"chat={smollm2}", "--set", "n_ctx=512", *more) as up:
            up.wait_for("ok")
            answers.append(httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=120).json())
    plain, drafted = answers
    assert "draft_n" not in plain["timings"]
    assert drafted["timings"]["draft_n"] > 0 and drafted["timings"]["draft_n_accepted"] > 0
    assert drafted["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]


def made_drafter(kind: str, folder: Path, smollm2: Path) -> tuple[Path, Path]:
    """Return a model, and a drafter of random weights that is made for it."""
    path, embd, layers = folder / "Head-F16.gguf", 576, (1, 15, 28)  # SmolLM2's width, and three of its 30 layers
    if kind == "draft-mtp":
        return write_gemma4(folder / "Gemma-F16.gguf", smollm2), write_assistant(path, smollm2, target_embd=128)
    if kind == "draft-eagle3":
        return smollm2, write_eagle3(path, smollm2, target_embd=embd, target_layers=layers)
    rank = 8 if kind == "draft-dspark" else 0
    return smollm2, write_dflash(path, smollm2, target_embd=embd, target_layers=layers, markov_rank=rank)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["draft-eagle3", "draft-dflash", "draft-dspark", "draft-mtp"])
def test_a_drafter_made_for_the_model_drafts(tmp_path: Path, smollm2: Path, kind: str) -> None:
    """It reads states of the model, or its KV cache; what it drafts is mostly wrong, and the answer the model's own."""
    model, path = made_drafter(kind, tmp_path, smollm2)
    body = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 8, "temperature": 0}
    with Up(tmp_path, "-p", "cpu", "-m", f"chat={model}", "--set", "n_ctx=512", "--set", f"draft={path}") as up:
        up.wait_for("ok")
        answer = httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=120).json()
        assert answer["timings"]["draft_n"] > 0, answer
        assert answer["usage"]["completion_tokens"] == 8, answer


WITH_MTP = Shape(arch="glm4moe", layers=3, mtp=1, embd=128, heads=2, kv_heads=2, ff=128, experts=(4, 2), tied=True)


@pytest.mark.e2e
def test_mtp_layers_of_a_file_draft(tmp_path: Path, smollm2: Path) -> None:
    """A file of random weights: its drafts are mostly wrong, and the answer is the same as without."""
    model = write(tmp_path / "Tiny-MTP-F16.gguf", WITH_MTP, smollm2)
    body = {"prompt": "one two three", "max_tokens": 24, "temperature": 0}
    answers = []
    for number, more in enumerate(((), ("--set", "speculation=mtp"))):
        with Up(tmp_path / str(number), "-p", "cpu", "-m", f"chat={model}", "--set", "n_ctx=512", *more) as up:
            up.wait_for("ok")
            answers.append(httpx.post(f"{up.url}/v1/completions", json=body, timeout=120).json())
    plain, drafted = answers
    assert "draft_n" not in plain["timings"]
    assert drafted["timings"]["draft_n"] > 0
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]


def test_mtp_layers_are_counted_where_they_draft(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer 2 and its cache of 512 tokens: 2 heads of 64 values, K and V, in f16."""
    model = write(tmp_path / "Tiny-MTP-F16.gguf", WITH_MTP, smollm2)
    layer = sum(int(each.n_bytes) for each in gguf.GGUFReader(model).tensors if each.name.startswith("blk.2."))
    for way, counted in (("off", 0), ("mtp", layer + 512 * 2 * 64 * 2 * 2)):
        words = ["--set", "n_ctx=512", "--set", f"speculation={way}", "--json", "--state-dir", str(tmp_path)]
        assert main(["plan", "-p", "cpu", "-m", str(model), *words]) == 0
        (planned,) = json.loads(capsys.readouterr().out)["models"].values()
        assert planned["model"]["drafter_bytes"] == counted, way


def test_a_header_whose_layers_are_all_for_mtp_drafts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Gguf("llama").model(n_layer=2).set("llama.nextn_predict_layers", 2).save(tmp_path / "a.gguf")
    words = ["--set", "speculation=mtp", "--state-dir", str(tmp_path)]
    assert main(["plan", "-p", "cpu", "-m", str(model), *words]) == 78
    assert "has no MTP layers that could draft" in capsys.readouterr().err


def test_a_drafter_is_counted_and_has_to_have_the_models_vocabulary(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(*more: str) -> tuple[int, dict[str, Any], str]:
        state = ["--state-dir", str(tmp_path)]
        code = main(["plan", "-p", "cpu", "-m", str(smollm2), "--set", "n_ctx=512", "--json", *state, *more])
        out, err = capsys.readouterr()
        return code, json.loads(out) if code == 0 else {}, err

    def weights(document: dict[str, Any]) -> int:
        (model,) = document["models"].values()
        (domain,) = model["ladder"][0]["memory"].values()
        return int(domain["weights_bytes"])

    drafted = plan("--set", f"draft={smollm2}")[1]
    assert weights(drafted) > 1.9 * weights(plan()[1])
    (file,) = (each["model"] for each in drafted["models"].values())
    assert file["drafter_bytes"] > 0.9 * file["bytes"] and file["adapter_bytes"] == file["mmproj_bytes"] == 0
    lora = adapter_of(smollm2, tmp_path / "small-lora.gguf")
    (file,) = (each["model"] for each in plan("--set", f"lora={lora}")[1]["models"].values())
    assert (file["adapter_bytes"], file["drafter_bytes"]) == (lora.stat().st_size, 0)
    small = Gguf("llama").model().save(tmp_path / "Small-Q5_K_M.gguf")
    strange = adapter_of(smollm2, tmp_path / "strange-lora.gguf")
    code = main(["plan", "-p", "cpu", "-m", str(small), "--set", f"lora={strange}", "--state-dir", str(tmp_path)])
    assert code == 78 and "is an adapter for another model than Small" in capsys.readouterr().err
    other = Gguf("llama").model().save(tmp_path / "Other-Q5_K_M.gguf")
    code, _, said = plan("--set", f"draft={other}")
    assert code == 78 and "has another vocabulary" in said
    for ref in ("NOPE:Q4_0", "/none.gguf"):
        code, _, said = plan("--set", f"draft={ref}")
        assert code == 69 and said.startswith("error: draft: no ")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--", "--kepe", "4"), "did you mean --keep?"),
        (("--", "--ctx-size", "4096"), "is decided by edgellm"),
        (("--set", "chat_template_file=/none.jinja"), "chat_template_file: no such file: /none.jinja"),
        (("--set", "lora=/none.gguf"), "lora: no such file: /none.gguf"),
        (("--set", "lora=MODEL"), "is no adapter but a model"),
    ],
)
def test_an_option_that_cannot_work_starts_nothing(
    tmp_path: Path, smollm2: Path, arguments: tuple[str, ...], said: str
) -> None:
    words = [word.replace("MODEL", str(smollm2)) for word in arguments]
    place = ("--state-dir", str(tmp_path), "--listen", "127.0.0.1:0")
    done = edgellm("up", "-p", "cpu", "-m", str(smollm2), *place, "--json", *words)
    assert done.returncode == 78, done.stdout + done.stderr
    assert said in done.stderr
    assert not any(json.loads(line)["event"] == "state" for line in done.stdout.splitlines())


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("key", "file", "code", "said"),
    [
        ("lora", lora_for("qwen2", 576), 78, "is an adapter for qwen2"),
        ("lora", lora_for("llama", 512), 78, "is an adapter for another model than"),
        ("draft", Gguf("llama").model(), 78, "has another vocabulary"),
        ("draft", Gguf("eagle3").model(vocab=49152).set("eagle3.target_hidden_size", 4096), 78, "4096 values a token"),
        ("mmproj", Gguf("clip").projector(4096), 65, "gives vectors of 4096 values, not of 576"),
    ],
    ids=["lora-architecture", "lora-shape", "draft-vocabulary", "draft-width", "mmproj-width"],
)
def test_a_file_for_another_model_starts_nothing(
    tmp_path: Path, smollm2: Path, key: str, file: Gguf, code: int, said: str
) -> None:
    path = file.save(tmp_path / "other-F16.gguf")
    place = ("--state-dir", str(tmp_path / "state"), "--listen", "127.0.0.1:0")
    done = edgellm("up", "-p", "cpu", "-m", f"chat={smollm2}", *place, "--json", "--set", f"{key}={path}")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr and done.stderr.startswith("error: "), done.stderr
    assert not any(json.loads(line)["event"] == "state" for line in done.stdout.splitlines())
    assert not list((tmp_path / "state").rglob("starts.jsonl")), "no engine was started"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.e2e
def test_thinking_is_switched_on_and_off(tmp_path: Path, smollm2: Path) -> None:
    """With the rule of Qwen3's template: an empty thought is written into the prompt where thinking is off."""
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING, encoding="utf-8")
    model = write(tmp_path / "Tiny-F16.gguf", Shape(layers=2, embd=128, heads=2, kv_heads=2, ff=128), smollm2)
    ways = {
        "on": 'reasoning = "on"',
        "off": 'reasoning = "off"',
        "auto": "",
        "kwargs": "chat_template_kwargs = { enable_thinking = false }",
    }
    config = tmp_path / "config" / "edgellm.toml"
    config.parent.mkdir()
    tables = (
        f'[[model]]\nid = "{name}"\nref = "{model}"\nchat_template_file = "{template}"\n[model.set]\n{line}\n'
        for name, line in ways.items()
    )
    config.write_text("schema = 1\n[set]\nn_ctx = 512\n" + "".join(tables), encoding="utf-8")
    with Up(tmp_path, "-p", "cpu") as up:
        up.wait_for("ok")

        def prompt(name: str, **more: Any) -> str:
            body = {"model": name, "messages": [{"role": "user", "content": "hello"}], **more}
            return str(httpx.post(f"{up.url}/apply-template", json=body, timeout=60).json()["prompt"])

        silent = {name for name in ways if "<think>\n\n</think>" in prompt(name)}
        assert silent == {"off", "kwargs"}
        assert "</think>" in prompt("on", chat_template_kwargs={"enable_thinking": False}), "a request may differ"
        assert "</think>" not in prompt("kwargs", chat_template_kwargs={"enable_thinking": True})


# As Qwen3.5's template: the thought is opened in the prompt.
OPENED = THINKING.replace("<|im_start|>assistant\n", "{% if add_generation_prompt %}<|im_start|>assistant\n")
OPENED = OPENED.removesuffix("{% endif %}") + "{% else %}<think>\n{% endif %}{% endif %}"


@pytest.mark.e2e
def test_thinking_ends_with_its_budget(tmp_path: Path, smollm2: Path) -> None:
    """The same tokens are thought without a limit; a budget writes the end tag behind its last token."""
    template = tmp_path / "thinking.jinja"
    template.write_text(OPENED, encoding="utf-8")
    model = write(tmp_path / "Tiny-F16.gguf", Shape(layers=2, embd=128, heads=2, kv_heads=2, ff=128), smollm2)
    config = tmp_path / "config" / "edgellm.toml"
    config.parent.mkdir()
    tables = (
        f'[[model]]\nid = "{name}"\nref = "{model}"\nset = {{ reasoning_budget = {budget} }}\n'
        for name, budget in (("none", 0), ("few", 6), ("free", -1))
    )
    shared = f'schema = 1\n[set]\nn_ctx = 512\nchat_template_file = "{template}"\n'
    config.write_text(shared + "".join(tables), encoding="utf-8")
    with Up(tmp_path, "-p", "cpu") as up:
        up.wait_for("ok")

        def answer(name: str) -> tuple[str, str]:
            """Return what was thought and what was said."""
            body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
            body |= {"max_tokens": 24, "ignore_eos": True}
            message = httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=120).json()["choices"][0][
                "message"
            ]
            return message.get("reasoning_content") or "", message["content"]

        thought, said = answer("free")
        assert thought and not said
        few, said = answer("few")
        assert few and thought.startswith(few) and len(few) < len(thought) and said
        none, said = answer("none")
        assert not none and said


@pytest.mark.e2e
def test_a_projector_of_one_model_makes_it_see(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LLaVA's encoder with two layers of zeros. It lies in another folder, so that only the key finds it."""
    tiny = Shape(layers=2, embd=128, heads=2, kv_heads=2, ff=128)
    model = write(tmp_path / "Tiny-F16.gguf", tiny, smollm2)
    (tmp_path / "eyes").mkdir()
    projector = write_projector(tmp_path / "eyes" / "mmproj-F16.gguf", "clip", tiny.embd)
    config = tmp_path / "config" / "edgellm.toml"
    config.parent.mkdir()
    config.write_text(
        f"""schema = 1
[set]
n_ctx = 2048
[[model]]
id = "seeing"
ref = "{model}"
mmproj = "{projector}"
[[model]]
id = "blind"
ref = "{model}"
""",
        encoding="utf-8",
    )
    assert main(["plan", "-p", "cpu", "--json", "--state-dir", str(tmp_path)]) == 0
    plans = json.loads(capsys.readouterr().out)["models"]
    size = sum(int(each.n_bytes) for each in gguf.GGUFReader(projector).tensors)
    assert {name: plan["model"]["mmproj_bytes"] for name, plan in plans.items()} == {"seeing": size, "blind": 0}
    weights = {name: plan["ladder"][0]["memory"]["host"]["weights_bytes"] for name, plan in plans.items()}
    assert weights["seeing"] == weights["blind"] + size
    image = base64.b64encode(grey_png(64)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}
    with Up(tmp_path, "-p", "cpu") as up:
        up.wait_for("ok")

        def asked(name: str, path: str, **more: Any) -> httpx.Response:
            return httpx.post(f"{up.url}{path}", json={"model": name, "max_tokens": 4, **more}, timeout=120)

        answer = asked("seeing", "/v1/chat/completions", messages=[message])
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > (336 // 14) ** 2, "a token for each patch"
        message = {"role": "user", "content": "What is this?", "images": [image]}
        assert asked("seeing", "/api/chat", messages=[message], stream=False).status_code == 200
        refused = asked("blind", "/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
        assert 400 <= refused.status_code <= 501 and "image input is not supported" in refused.text, refused.text


@pytest.mark.e2e
def test_pooling_sampling_and_rope_are_at_work(tmp_path: Path, smollm2: Path) -> None:
    tiny = Shape(layers=2, embd=128, heads=2, kv_heads=2, ff=128, ctx=1024)
    model = write(tmp_path / "Tiny-F16.gguf", tiny, smollm2)
    encoder = Shape(
        arch="qwen3", layers=2, embd=128, ff=128, heads=2, kv_heads=2, tied=True, pooling=gguf.PoolingType.LAST
    )
    embedder = write(tmp_path / "Embed-F16.gguf", encoder, smollm2)
    sampling = {"top_p": 0.5, "min_p": 0.25, "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    lines = "".join(f"{key} = {value}\n" for key, value in sampling.items())
    config = tmp_path / "config" / "edgellm.toml"
    config.parent.mkdir()
    config.write_text(
        f"""schema = 1
[[model]]
id = "long"
ref = "{model}"
[model.set]
n_ctx = 4096
rope_scaling = "yarn"
rope_scale = 4.0
{lines}
[[model]]
id = "last"
ref = "{embedder}"
set = {{ n_ctx = 512 }}
[[model]]
id = "mean"
ref = "{embedder}"
set = {{ n_ctx = 512, pooling = "mean" }}
""",
        encoding="utf-8",
    )
    with Up(tmp_path, "-p", "cpu") as up:
        up.wait_for("ok")
        settings = httpx.get(f"{up.url}/upstream/long/props", timeout=60).json()["default_generation_settings"]
        assert settings["n_ctx"] == 4096, "four times what the file was trained for"
        assert {key: settings["params"][key] for key in sampling} == sampling

        def embedding(name: str) -> list[float]:
            body = {"model": name, "input": "one two three four"}
            answer = httpx.post(f"{up.url}/v1/embeddings", json=body, timeout=60).json()
            return [float(each) for each in answer["data"][0]["embedding"]]

        last, mean = embedding("last"), embedding("mean")
        assert len(last) == len(mean) == 128
        assert max(abs(a - b) for a, b in zip(last, mean, strict=True)) > 0.01
