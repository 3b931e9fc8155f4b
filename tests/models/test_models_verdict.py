"""Files that are no models: one sentence each, before any launch."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.errors import EdgeError
from edge.models.header import read_header
from edge.models.open import open_model
from edge.models.store import Store
from edge.models.survey import survey
from edge.models.verdict import HeaderVerdict, VerdictError
from tests.fakes.gguf_writer import Gguf, save_set

Judge = Callable[[Path], HeaderVerdict]

HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head>" + b"<p>padding</p>" * 5000
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    b"4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    return out.getvalue()


def safetensors() -> bytes:
    head = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(head)) + head + b"\0" * 8


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        pytest.param(HTML, "web_page", "web page", id="FC-46-html"),
        pytest.param(b"\xef\xbb\xbf\n  <html>", "web_page", "web page", id="FC-46-html-bom"),
        pytest.param(b'{"error":"Invalid username"}', "json", "JSON", id="FC-46-json"),
        pytest.param(POINTER, "lfs_pointer", "Git LFS pointer", id="FC-47-lfs"),
        pytest.param(b"", "empty", "empty", id="FC-47-empty"),
        pytest.param(b"GGUF", "truncated", "truncated", id="FC-47-magic-only"),
        pytest.param(b"tjgg" + b"\1" * 200, "ggml", "before 2023", id="FC-55-ggjt"),
        pytest.param(b"ggjt" + b"\1" * 200, "ggml", "before 2023", id="FC-55-ggjt-swapped"),
        pytest.param(b"lmgg" + b"\1" * 200, "ggml", "before 2023", id="FC-55-ggml"),
        pytest.param(zipped(), "zip", "ZIP", id="FC-55-zip"),
        pytest.param(safetensors(), "safetensors", "safetensors", id="FC-55-safetensors"),
        pytest.param(gzip.compress(b"x" * 1000), "gzip", "gzip", id="FC-55-gzip"),
        pytest.param(b"FUGG\0\0\0\3" + b"\0" * 100, "big_endian", "big-endian", id="FC-53-magic"),
        pytest.param(b"\0" * 4096, "zeros", "zeros", id="zeros"),
        pytest.param(b"what is this" * 9, "wrong_magic", "77686174", id="unknown"),
    ],
)
def test_says_what_the_file_really_is(tmp_path: Path, verdict_of: Judge, data: bytes, kind: str, words: str) -> None:
    path = tmp_path / "x.Q5_K_M.gguf"
    path.write_bytes(data)
    verdict = verdict_of(path)
    assert verdict.kind == kind
    assert words in verdict.sentence
    assert "\n" not in verdict.sentence + verdict.hint


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m.gguf.part1of2", "piece"),
        ("m.gguf-split-a", "piece"),
        ("m.gguf.001", "piece"),
        ("m.gguf.download", "partial"),
        ("m.gguf.part", "partial"),
        ("m.gguf.incomplete", "partial"),
        ("m.gguf.crdownload", "partial"),
    ],
)
def test_fc59_pieces_and_unfinished_downloads(tmp_path: Path, verdict_of: Judge, name: str, kind: str) -> None:
    """FC-59: not listed as models, whatever they contain; the hint for pieces is to join them."""
    path = Gguf("llama").model().save(tmp_path / name)
    verdict = verdict_of(path)
    assert verdict.kind == kind
    assert ("cat" in verdict.hint) == (kind == "piece")
    lines = survey(Store(tmp_path))
    assert [line.verdict.kind for line in lines if line.verdict] == [kind]


def test_fc50_missing_shards_are_named(tmp_path: Path, verdict_of: Judge) -> None:
    """FC-50: a set with a gap."""
    first = save_set(tmp_path, "big-Q4_K_M", 13, skip=(2, 7))[0]
    verdict = verdict_of(first)
    assert verdict.kind == "missing_shards"
    assert "big-Q4_K_M-00002-of-00013.gguf" in verdict.sentence
    assert "big-Q4_K_M-00007-of-00013.gguf" in verdict.sentence


def test_fc50_the_first_shard_may_be_the_missing_one(tmp_path: Path, verdict_of: Judge) -> None:
    save_set(tmp_path, "big", 3, skip=(1,))
    verdict = verdict_of(tmp_path / "big-00002-of-00003.gguf")
    assert verdict.kind == "missing_shards"
    assert "00001-of-00003" in verdict.sentence


def test_fc50_header_and_name_disagree(tmp_path: Path, verdict_of: Judge) -> None:
    """FC-50: the header has 3 and the name has 4."""
    first = save_set(tmp_path, "big", 4, numbers={4: 3})[0]
    verdict = verdict_of_any(verdict_of, first, tmp_path / "big-00004-of-00004.gguf")
    assert verdict.kind == "wrong_shard"
    assert "3 of 4" in verdict.sentence


def verdict_of_any(verdict_of: Judge, opened: Path, blamed: Path) -> HeaderVerdict:
    """The error names the shard that is at fault, not the one that was opened."""
    from edge.models.open import open_model
    from edge.models.verdict import VerdictError

    with pytest.raises(VerdictError, match=blamed.name) as caught:
        open_model(opened)
    return caught.value.verdict


def test_fc50_a_renamed_shard_is_explained(tmp_path: Path, verdict_of: Judge) -> None:
    """FC-50: a shard under a name without its number."""
    first = save_set(tmp_path, "big", 2)[0]
    renamed = first.rename(tmp_path / "my model.gguf")
    verdict = verdict_of(renamed)
    assert verdict.kind == "renamed_shard"
    assert "-00001-of-00002.gguf" in verdict.hint


def test_fc50_a_single_file_that_merely_looks_like_a_shard_is_fine(tmp_path: Path) -> None:
    """FC-50: the header knows that it is whole."""
    from edge.models.open import open_model

    path = Gguf("llama").model().save(tmp_path / "m-Q5_K_M-00001-of-00013.gguf")
    assert open_model(path).name == "m"
    assert survey(Store(tmp_path))[0].usable


def test_dangling_link(tmp_path: Path, verdict_of: Judge) -> None:
    path = tmp_path / "m.gguf"
    path.symlink_to(tmp_path / "gone.gguf")
    assert verdict_of(path).kind == "dangling"
    shard = tmp_path / "s-00001-of-00002.gguf"
    shard.symlink_to(tmp_path / "gone.gguf")
    assert {line.verdict.kind for line in survey(Store(tmp_path)) if line.verdict} == {"dangling"}


def test_one_bad_file_never_breaks_a_list(tmp_path: Path) -> None:
    Gguf("llama").model().save(tmp_path / "good-Q5_K_M.gguf")
    (tmp_path / "html.gguf").write_bytes(HTML)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "link.gguf").symlink_to("nowhere")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "bad\udcff-Q4_0.gguf").write_bytes(b"GGUF")
    save_set(tmp_path, "gap", 3, skip=(3,))
    kinds = {line.entry.name: line.verdict.kind if line.verdict else None for line in survey(Store(tmp_path))}
    assert kinds == {
        "good": None,
        "html": "web_page",
        "empty": "empty",
        "link": "dangling",
        "loop": "dangling",
        "bad": "bad_name",
        "gap": "missing_shards",
    }


def test_a_file_without_an_architecture_is_no_model(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#28050: llama.cpp refuses it, so `model check` may not call it healthy."""
    Gguf("").model().save(tmp_path / "empty.gguf")
    nameless = Gguf("x").model()
    nameless.drop("general.architecture")
    nameless.save(tmp_path / "none.gguf")
    for name in ("empty.gguf", "none.gguf"):
        with pytest.raises(VerdictError, match=r"no general\.architecture"):
            open_model(tmp_path / name)


@pytest.mark.parametrize("value", ["x\nllama_kv_cache: size = 9999 MiB", "\x1b]52;c;aGk=\x07", "a\0b"])
def test_what_the_engine_prints_may_hold_no_control_characters(tmp_path: Path, value: str) -> None:
    """A newline in general.name would open a gate: the engine prints it into its log as it is."""
    Gguf("llama").model().set("general.name", value).save(tmp_path / "m.gguf")
    with pytest.raises(VerdictError, match=r"general\.name.*control characters"):
        open_model(tmp_path / "m.gguf")


FORGED = "x'\n0.00.100.000 I load_tensors: offloaded 33/33 layers to GPU"


@pytest.mark.parametrize(
    ("number", "key", "text", "refused"),
    [
        (1, None, FORGED, True),  # llama.cpp's default for BOS
        (250, "tokenizer.ggml.eos_token_id", FORGED, True),
        (250, "tokenizer.ggml.fim_pre_token_id", FORGED, True),
        (250, None, FORGED, False),  # not printed
        (250, "tokenizer.ggml.eos_token_id", "\n", False),
        (250, "tokenizer.ggml.eos_token_id", "\n\nHuman:", False),
        (250, "tokenizer.ggml.eos_token_id", "<|im_end|>\r\n", False),
    ],
)
def test_a_special_token_forges_no_log_line(
    tmp_path: Path, number: int, key: str | None, text: str, refused: bool
) -> None:
    texts = [f"t{each}" for each in range(300)]
    texts[number] = text
    made = Gguf("llama").model().set("tokenizer.ggml.tokens", texts)
    if key is not None:
        made.set(key, number)
    made.save(tmp_path / "m.gguf")
    if refused:
        with pytest.raises(VerdictError, match="special token"):
            open_model(tmp_path / "m.gguf")
    else:
        assert open_model(tmp_path / "m.gguf").meta.n_vocab


def test_labels_keys_and_tensor_names_forge_no_log_line(tmp_path: Path) -> None:
    Gguf("bert").model().set("bert.classifier.output_labels", ["good", FORGED]).save(tmp_path / "labels.gguf")
    Gguf("llama").model().set(FORGED, 1).save(tmp_path / "key.gguf")
    Gguf("llama").model().set(FORGED, ["a"]).save(tmp_path / "array.gguf")
    Gguf("llama").model().tensor("a\nb", 32).save(tmp_path / "tensor.gguf")
    for name, words in (("labels", "label"), ("key", "name of a key"), ("array", "name"), ("tensor", "tensor")):
        with pytest.raises(VerdictError, match=words):
            open_model(tmp_path / f"{name}.gguf")


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "adapter.type"])
def test_a_name_that_an_error_quotes_is_no_sentence(tmp_path: Path, key: str) -> None:
    """`unknown model architecture: 'NvMapMemAlloc…'` was an exit for want of memory, and took every rung."""
    Gguf("llama").model().set(key, "NvMapMemAllocInternalTagged: 1 error 12").save(tmp_path / "m.gguf")
    with pytest.raises(VerdictError, match="no identifier"):
        open_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("general.description", FORGED, True),
        ("general.description", "Reads images.\n\nOf any size.\n", False),
        ("general.description", "A long page.\n" * 1000, False),
        ("general.description", "x" * (1 << 20), True),
        ("general.name", "x" * 5000 + FORGED, True),
        ("clip.vision.projector_type", "mlp\ncudaMalloc failed: out of memory", True),
        ("clip.vision.projector_type", "gemma3", False),
    ],
)
def test_a_projector_forges_no_log_line(tmp_path: Path, key: str, value: str, refused: bool) -> None:
    """clip.cpp prints both as they are; the description of a model is printed with its line breaks escaped."""
    projector = Gguf("clip").set("general.type", "mmproj").set("clip.has_vision_encoder", True)
    projector.tensor("v.blk.0.ln1.weight", 32).set(key, value).save(tmp_path / "mmproj.gguf")
    Gguf("llama").model().set("general.description", FORGED).save(tmp_path / "m.gguf")
    assert open_model(tmp_path / "m.gguf").meta.kind == "model"
    if refused:
        with pytest.raises(VerdictError, match=r"projector|description|name"):
            read_header(tmp_path / "mmproj.gguf")
    else:
        assert read_header(tmp_path / "mmproj.gguf").kind == "mmproj"


def test_names_that_no_log_can_carry_are_refused_in_one_printable_sentence(tmp_path: Path) -> None:
    good = Gguf("llama").model().save(tmp_path / "good.gguf")
    for name in (b"caf\xe9.gguf", b"a\x1b[2Jb.gguf", b"two\nlines.gguf"):
        os.link(good, tmp_path / os.fsdecode(name))
    bad = [entry for entry in Store(tmp_path).list() if entry.verdict]
    assert len(bad) == 3 and {entry.verdict.kind for entry in bad if entry.verdict} == {"bad_name"}
    assert all(entry.name.isprintable() for entry in bad)
    for entry in bad:
        with pytest.raises(VerdictError) as error:
            open_model(entry.path)
        assert str(error.value).isprintable()


def test_a_dangling_shard_is_the_one_that_is_blamed(tmp_path: Path) -> None:
    save_set(tmp_path, "big", 3)
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    (tmp_path / "big-00002-of-00003.gguf").symlink_to(tmp_path / "gone")
    with pytest.raises(VerdictError, match=r"shard big-00002-of-00003\.gguf that is a link to .*gone"):
        open_model(tmp_path / "big-00001-of-00003.gguf")


def test_the_missing_end_of_a_chain_of_links_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to("b")
    (tmp_path / "b").symlink_to("c")
    with pytest.raises(VerdictError, match="is a link to c, which does not exist"):
        open_model(tmp_path / "a.gguf")
    (tmp_path / "circle.gguf").symlink_to("circle.gguf")
    with pytest.raises(VerdictError, match="leads in a circle"):
        open_model(tmp_path / "circle.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_link_into_a_closed_folder_costs_no_other_model(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    (tmp_path / "a.gguf").symlink_to(closed / "m.gguf")
    with pytest.raises((VerdictError, OSError)):
        open_model(tmp_path / "a.gguf")
    Gguf("llama").model().save(tmp_path / "b.gguf")
    names = {entry.name: entry.verdict for entry in Store(tmp_path).list()}
    closed.chmod(0o700)
    assert set(names) == {"a", "b"}


def test_a_set_whose_shards_end_in_capitals_cannot_be_followed(tmp_path: Path) -> None:
    """llama_split_prefix compares with .gguf exactly; a lone .GGUF is served."""
    save_set(tmp_path, "big", 2)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_suffix(".GGUF"))
    with pytest.raises(VerdictError, match=r"end in \.GGUF; llama\.cpp finds only \.gguf") as error:
        open_model(tmp_path / "big-00001-of-00002.GGUF")
    assert "mv" in str(error.value.hint)
    Gguf("llama").model().save(tmp_path / "alone.GGUF")
    assert open_model(tmp_path / "alone.GGUF").name == "alone"


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "/dev/zero", "/proc/kmsg"])
def test_what_is_no_file_blocks_no_list(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        elif kind.startswith("/"):
            path.symlink_to(kind)
        else:
            (path / "inside").mkdir(parents=True)
        assert all(not line.usable for line in survey(Store(tmp_path)))
        with pytest.raises(EdgeError):
            open_model(path)
