"""The header reader: what it reads, and what it refuses."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.models.header import _KEPT_FILES, peek_kind, read_header, read_kept
from edge.models.meta import Split
from edge.models.open import open_model
from edge.models.store import Store
from edge.models.survey import survey
from edge.models.verdict import HeaderVerdict, VerdictError
from tests.fakes.gguf_writer import Gguf, pack, save_set, text

Judge = Callable[[Path], HeaderVerdict]


def test_reads_every_field_of_a_dense_model(tmp_path: Path) -> None:
    gguf = Gguf("llama").model(n_layer=3, n_embd=512, n_head=8, n_head_kv=2, ctx=131072, vocab=40)
    meta = read_header(gguf.save(tmp_path / "a.gguf"))
    assert (meta.arch, meta.name, meta.n_layer, meta.n_embd, meta.n_head) == ("llama", "tiny", 3, 512, 8)
    assert meta.n_head_kv == (2, 2, 2)
    assert (meta.key_length, meta.value_length) == (64, 64)
    assert (meta.n_ctx_train, meta.n_vocab, meta.sliding_window, meta.n_expert) == (131072, 40, None, 0)
    assert (meta.quant, meta.file_type, meta.tokenizer, meta.chat_template) == ("Q5_K_M", 17, "gpt2", True)
    assert meta.file_bytes == (tmp_path / "a.gguf").stat().st_size
    assert meta.tensor_bytes == sum(spec.size for spec in gguf.tensors)
    assert meta.tensors[1].offset % 32 == 0
    assert meta.kind == "model"


def test_fc22_head_counts_missing_per_layer_and_explicit_lengths(tmp_path: Path) -> None:
    """FC-22: no head_count_kv; a per-layer array; key_length that is not embedding / heads; a sliding window."""
    without = read_header(
        Gguf("llama").model(n_layer=2).drop("llama.attention.head_count_kv").save(tmp_path / "a.gguf")
    )
    assert without.n_head_kv == (4, 4)
    gguf = Gguf("gemma4").model(n_layer=3).set("gemma4.attention.head_count_kv", [8, 0, 1])
    gguf.set("gemma4.attention.key_length", 512).set("gemma4.attention.value_length", 256)
    gguf.set("gemma4.attention.sliding_window", 1024).set(
        "gemma4.attention.sliding_window_pattern", [True, True, False]
    )
    gguf.set("gemma4.attention.shared_kv_layers", 20.0)
    meta = read_header(gguf.save(tmp_path / "b.gguf"))
    assert meta.n_head_kv == (8, 0, 1)
    assert (meta.key_length, meta.value_length, meta.sliding_window) == (512, 256, 1024)
    assert meta.arrays["gemma4.attention.sliding_window_pattern"] == (True, True, False)
    assert meta.extra["gemma4.attention.shared_kv_layers"] == 20.0


def test_fc56_mixture_of_experts_is_complete_by_offsets(tmp_path: Path) -> None:
    """FC-56: expert tensors without the dense ones, and no BOS id, are no fault."""
    gguf = Gguf("qwen3moe").model(n_layer=1).set("qwen3moe.expert_count", 128).set("qwen3moe.expert_used_count", 8)
    gguf.tensors = [spec for spec in gguf.tensors if "ffn_up" not in spec.name]
    gguf.tensor("blk.0.ffn_up_exps.weight", 256, 32, 16, type="Q5_K")
    model = open_model(gguf.save(tmp_path / "moe-Q5_K_M.gguf"))
    assert model.meta.n_expert == 128
    assert model.notes == ()


def test_fc56_unknown_architecture_is_passed_with_a_note(tmp_path: Path) -> None:
    """FC-56: what this program never heard of is the engine's to judge."""
    model = open_model(Gguf("qwen9moon").model().save(tmp_path / "new-Q5_K_M.gguf"))
    assert model.meta.arch == "qwen9moon"
    assert any("qwen9moon" in note for note in model.notes)


def test_tensor_type_of_the_future_is_sized_by_offsets(tmp_path: Path) -> None:
    gguf = Gguf("llama").model()
    gguf.tensors[1].type = 77
    meta = read_header(gguf.save(tmp_path / "a.gguf"))
    assert meta.tensors[1].type == "TYPE77"
    assert meta.tensors[1].bytes == gguf.padded(gguf.tensors[1].size)
    newer = "tensor type 77 is newer than edgellm's list; the engine decides whether it loads"
    assert newer in open_model(tmp_path / "a.gguf").notes
    (line,) = survey(Store(tmp_path))
    assert newer in line.notes


def test_removed_tensor_type(tmp_path: Path, verdict_of: Judge) -> None:
    gguf = Gguf("llama").model()
    gguf.tensors[1].type = 31
    assert verdict_of(gguf.save(tmp_path / "a.gguf")).kind == "removed_type"


@pytest.mark.parametrize("cut", ["half", "last", "data", "header", "tensor_info"])
def test_fc49_truncated_says_expected_and_actual_bytes_and_the_tensor(
    tmp_path: Path, verdict_of: Judge, cut: str
) -> None:
    """FC-49: cut to half, by its last byte, to the start of the data, and inside the header."""
    gguf = Gguf("llama").model()
    whole, head = gguf.bytes(), len(gguf.header())
    size = {"half": len(whole) // 2, "last": len(whole) - 1, "data": head + 40, "header": 60, "tensor_info": head - 8}
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[: size[cut]])
    verdict = verdict_of(path)
    assert verdict.kind == "truncated"
    assert f"{size[cut]:,}" in verdict.sentence
    if cut in ("half", "last", "data"):
        assert f"{len(whole):,}" in verdict.sentence
    first = {"last": "output_norm.weight", "data": "token_embd.weight"}
    if cut in first:
        assert first[cut] in verdict.sentence


def test_fc49_missing_padding_at_the_end_is_no_truncation(tmp_path: Path) -> None:
    """Writers need not pad the last tensor: only its own bytes must be there."""
    gguf = Gguf("llama").model().tensor("tail", 3)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf.bytes()[:-20])
    assert read_header(path).tensors[-1].bytes == 12


def test_fc49_forty_gigabytes_are_judged_by_the_header(tmp_path: Path, verdict_of: Judge) -> None:
    """FC-49: a 40 GB file takes no longer than a small one, for no tensor data is read."""
    gguf = Gguf("llama").model(n_layer=1)
    gguf.tensor("big", 8192, 8192, 900, type="Q5_K")
    path = gguf.save_sparse(tmp_path / "big-Q5_K_M.gguf")
    size = path.stat().st_size
    assert size > 40e9
    assert open_model(path).bytes == size
    with path.open("r+b") as file:
        file.truncate(size - 4096)
    assert "big" in verdict_of(path).sentence


@pytest.mark.parametrize(
    ("raw", "kind", "word"),
    [
        (b"\0\0\0\3", "big_endian", "big-endian"),
        (b"\0\0\0\2", "big_endian", "big-endian"),
        (b"\1\0\0\0", "version", "version 1"),
        (b"\4\0\0\0", "version", "version 4"),
        (b"\0\0\0\0", "version", "version 0"),
    ],
)
def test_fc53_byte_order_and_version(tmp_path: Path, verdict_of: Judge, raw: bytes, kind: str, word: str) -> None:
    """FC-53: a big-endian file and versions this program does not read."""
    path = tmp_path / "m.gguf"
    whole = Gguf("llama").model().bytes()
    path.write_bytes(whole[:4] + raw + whole[8:])
    verdict = verdict_of(path)
    assert verdict.kind == kind
    assert word in verdict.sentence


def test_version_2_is_read(tmp_path: Path) -> None:
    assert read_header(Gguf("llama", version=2).model().save(tmp_path / "a.gguf")).n_layer == 2


@pytest.mark.parametrize(
    ("gguf", "kind"),
    [
        (Gguf("clip").projector(), "mmproj"),
        (Gguf("clip").set("general.type", "clip-vision").tensor("v", 32, 32), "mmproj"),
        (Gguf("llama").set("general.type", "adapter").set("adapter.type", "lora").tensor("a", 32, 4), "adapter"),
        (Gguf("controlvector").tensor("direction.1", 32), "adapter"),
        (Gguf("imatrix").set("general.type", "imatrix").set("imatrix.datasets", ["wiki"]).tensor("x", 32), "imatrix"),
        (Gguf("llama").set("tokenizer.ggml.tokens", ["a"]), "vocab"),
    ],
)
def test_fc52_healthy_files_that_are_no_models(tmp_path: Path, verdict_of: Judge, gguf: Gguf, kind: str) -> None:
    """FC-52: projector, adapter, vocabulary and importance matrix are recognized by their header."""
    assert verdict_of(gguf.save(tmp_path / "x-Q5_K_M.gguf")).kind == kind


def test_peek_reads_no_tokenizer(tmp_path: Path) -> None:
    """The kind is read from the first keys, even when what follows is torn."""
    path = tmp_path / "p.gguf"
    whole = Gguf("clip").projector().set("tokenizer.ggml.tokens", ["x"] * 100).bytes()
    path.write_bytes(whole[: whole.index(b"tokenizer") + 40])
    assert peek_kind(path) == "mmproj"
    path.write_bytes(b"nothing")
    assert peek_kind(path) is None


def _lie(**counts: int) -> Gguf:
    gguf = Gguf("llama").model()
    for name, value in counts.items():
        setattr(gguf, name, value)
    return gguf


@pytest.mark.parametrize(
    "gguf",
    [
        _lie(tensor_count=2**63),
        _lie(tensor_count=60_000),
        _lie(key_count=2**63),
        _lie(key_count=900),
        Gguf("llama").model().raw("x", struct.pack("<IQ", 8, 2**62)),
        Gguf("llama").model().raw("x", struct.pack("<IIQ", 9, 8, 2**62)),
        Gguf("llama").model().raw("x", struct.pack("<IIQ", 9, 10, 2**61)),
        Gguf("llama").model().raw("x", struct.pack("<IIQ", 9, 9, 1) + pack([1])),
        Gguf("llama").model().raw("x", struct.pack("<I", 13)),
        Gguf("llama").model().set("general.alignment", 0),
        Gguf("llama").model().set("general.alignment", 33),
        Gguf("llama").model().set("general.alignment", 2**31),
        Gguf("llama").model().set("general.architecture", 7).set("general.file_type", "many"),
        Gguf("llama").model().set("llama.block_count", 2**31),
        Gguf("llama").model().set("llama.block_count", "two"),
        Gguf("llama").model().set("llama.block_count", 0),
        Gguf("llama").model().set("llama.context_length", -1, 5),
        Gguf("llama").model().set("llama.attention.head_count_kv", [1]),
        Gguf("llama").model().set("llama.attention.head_count_kv", [2**60, 2**60]),
        Gguf("llama").model().set("split.count", 2, 2).set("split.no", 7, 2),
        Gguf("llama").model().tensor("n" * 500, 32),
        Gguf("llama").model().tensor("blk.0.attn_q.weight", 32),
        Gguf("llama").model().raw("", pack(1)),
    ],
    ids=lambda gguf: None,
)
def test_damaged_headers_are_refused_in_one_sentence(tmp_path: Path, verdict_of: Judge, gguf: Gguf) -> None:
    verdict = verdict_of(gguf.save(tmp_path / "m.gguf"))
    assert verdict.kind in ("damaged", "truncated")
    assert "\n" not in verdict.sentence and len(verdict.sentence) < 200


@pytest.mark.parametrize(("dims", "type"), [((2**40, 2**40), 0), ((33,), 8), ((1, 1, 1, 1, 1), 0)])
def test_impossible_shapes(tmp_path: Path, verdict_of: Judge, dims: tuple[int, ...], type: int) -> None:
    gguf = Gguf("llama").model()
    gguf.tensors[0].dims, gguf.tensors[0].type = dims, type
    assert verdict_of(gguf.save(tmp_path / "m.gguf")).kind == "damaged"


def test_misaligned_tensor(tmp_path: Path, verdict_of: Judge) -> None:
    gguf = Gguf("llama").model()
    gguf.tensors[1].offset = 7
    assert verdict_of(gguf.save(tmp_path / "m.gguf")).kind == "damaged"


def test_duplicate_key(tmp_path: Path, verdict_of: Judge) -> None:
    gguf = Gguf("llama").model()
    gguf.keys["again"] = pack(1) + text("general.architecture") + pack("x")
    gguf.key_count = len(gguf.keys) + 1
    assert "twice" in verdict_of(gguf.save(tmp_path / "m.gguf")).sentence


def test_long_strings_and_arrays_are_skipped_but_known(tmp_path: Path) -> None:
    gguf = Gguf("llama").set("tokenizer.chat_template", "x" * 300_000).set("weights", list(range(5000))).model()
    gguf.set("tokenizer.chat_template", "y" * 600_000)
    meta = read_header(gguf.save(tmp_path / "a.gguf"))
    assert meta.chat_template
    assert "weights" not in meta.arrays
    assert meta.n_layer == 2


def test_big_vocabulary_crosses_many_windows(tmp_path: Path) -> None:
    """String arrays are walked, not read: lengths that straddle the window's edge included."""
    words = ["w" * (n % 700) for n in range(20_000)]
    meta = read_header(Gguf("llama").set("tokenizer.ggml.merges", words).model().save(tmp_path / "a.gguf"))
    assert meta.n_layer == 2
    assert meta.n_vocab == 32


def test_set_is_one_model(tmp_path: Path) -> None:
    first = save_set(tmp_path, "big-Q5_K_M", 3)[0]
    model = open_model(first)
    assert model.meta.split == Split(0, 3)
    assert (model.name, model.quant, len(model.shards)) == ("big", "Q5_K_M", 3)
    assert model.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(model.meta.tensors) == 8 + 2
    assert open_model(tmp_path / "big-Q5_K_M-00002-of-00003.gguf") == model


def test_a_first_shard_without_tensors_is_fine(tmp_path: Path) -> None:
    paths = save_set(tmp_path, "m", 2)
    gguf = Gguf("llama").model().set("split.no", 0, 2).set("split.count", 2, 2)
    gguf.tensors = []
    gguf.save(paths[0])
    assert open_model(paths[0]).meta.kind == "model"


def test_error_names_the_file_but_not_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "secret-place" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(VerdictError) as caught:
        read_header(path)
    assert "secret-place" not in str(caught.value)


def test_a_kept_header_is_the_one_that_was_read(tmp_path: Path) -> None:
    path = Gguf("llama").model(n_layer=2, vocab=500).set("llama.rope.freq_base", 1e6).save(tmp_path / "a.gguf")
    folder = tmp_path / "kept"
    assert read_kept(path, folder) == read_header(path)
    (kept,) = folder.iterdir()
    kept.write_text(kept.read_text().replace('"tiny"', '"kept"'))
    assert read_kept(path, folder).name == "kept"
    assert read_kept(path, None).name == "tiny"


@pytest.mark.parametrize("damage", ["replaced", "cut", "another format", "writable by others", "another file's"])
def test_a_kept_header_that_may_be_another_one_is_read_again(damage: str, tmp_path: Path) -> None:
    path, folder = Gguf("llama").model(n_layer=2).save(tmp_path / "a.gguf"), tmp_path / "kept"
    read_kept(path, folder)
    (kept,) = folder.iterdir()
    text = kept.read_text().replace('"tiny"', '"kept"')
    match damage:
        case "replaced":
            Gguf("llama").model(n_layer=3).save(tmp_path / "b.gguf").replace(path)
            kept.write_text(text)
        case "cut":
            kept.write_text(text[: len(text) // 2])
        case "another format":
            kept.write_text("[0," + text.partition(",")[2])
        case "writable by others":
            kept.write_text(text)
            kept.chmod(0o666)
        case _:
            kept.write_text(text.replace(f"{path.stat().st_ino}]", f"{path.stat().st_ino + 1}]", 1))
    assert read_kept(path, folder) == read_header(path)
    assert read_kept(path, folder).name == "tiny"


def test_a_kept_header_is_no_way_around_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path, folder = Gguf("llama").model().save(tmp_path / "a.gguf"), tmp_path / "kept"
    read_kept(path, folder)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_kept(path, folder)
    path.mkdir()
    with pytest.raises(VerdictError):
        read_kept(path, folder)


def test_headers_that_cannot_be_kept_are_read(tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "a.gguf")
    (tmp_path / "kept").write_text("no folder")
    assert read_kept(path, tmp_path / "kept") == read_header(path)


def test_the_oldest_kept_headers_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept: list[Path] = []
    for number in range(_KEPT_FILES + 3):
        read_kept(Gguf("llama").model(n_layer=1).save(tmp_path / f"{number}.gguf"), folder)
        (new,) = set(folder.iterdir()) - set(kept)
        os.utime(new, (number, number))
        kept.append(new)
    assert set(folder.iterdir()) == set(kept[-_KEPT_FILES:])
