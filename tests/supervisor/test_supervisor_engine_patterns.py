"""build/llama-server.toml: each signature is met by a line of its kind, and by no earlier signature.

The lines are rendered from the message formats of llama.cpp, CUDA, NvMap and the kernel, with values of our own; ids in
the comments name public reports of the same fault.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from edge.resources import data_dir, load_toml
from tests.supervisor import loader_errors

_TABLE: dict[str, Any] = load_toml(data_dir("build") / "llama-server.toml")

LINES = {
    "nvmap-refused": [  # B-01, B-02, B-46, FC-16
        "NvMapMemAllocInternalTagged: 1074810371 error 12",
        "NvMapMemHandleAlloc: error 0",
    ],
    "nvmap-permission": [  # B-15, B-17, B-51
        "NvRmMemInitNvmap failed: error Permission denied",
        "NvRmMemInitNvmap failed with Permission denied",
        "****NvRmMemInit failed**** error type: 196625",
    ],
    "nvrm-open": ["libnvrm_gpu.so: NvRmGpuLibOpen failed"],  # B-21
    "vmm-reserve": ["  cuMemAddressReserve(&pool_addr, CUDA_POOL_VMM_MAX_SIZE, 0, 0, 0)"],  # B-10, FC-11
    "no-kernel-image": ["CUDA error: no kernel image is available for execution on the device"],  # A-02, B-11
    "ptx-toolchain": ["CUDA error: the provided PTX was compiled with an unsupported toolchain."],  # B-35, FC-05
    "driver-insufficient": [  # B-37
        "E ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient for CUDA runtime version"
    ],
    "cuda-no-device": ["ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"],  # B-31, FC-74
    "cuda-init": ["ggml_cuda_init: failed to initialize CUDA: unknown error"],  # B-33
    "not-compiled-for-gpu": [
        "warning: not compiled with GPU offload support, --gpu-layers option will be ignored"
    ],  # FC-41
    "no-usable-gpu": ["warning: no usable GPU found, --gpu-layers option will be ignored"],  # B-33
    "libcuda-stub": ["/usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1: file too short"],  # B-47
    "undefined-symbol": ["libcuda.so.1.1: undefined symbol: cuCtxCreate_v4"],  # B-13
    "cuda-library-missing": [
        "llama-server: error while loading shared libraries: libcudart.so.13: cannot open shared object file"
    ],
    "library-missing": [  # B-49, FC-10
        "llama-server: error while loading shared libraries: libllama-common.so.0: cannot open shared object file"
    ],
    "embedded-library-missing": [
        "ImportError: libgomp.so.1: cannot open shared object file: No such file or directory",
    ],
    "glibc-too-old": [
        "llama-server: /lib/aarch64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by llama-server)",
        "libstdc++.so.6: version `GLIBCXX_3.4.30' not found",
    ],
    "exec-format": ["cannot execute binary file: Exec format error"],
    "illegal-instruction": ["Illegal instruction (core dumped)"],  # B-50
    "invalid-argument": [
        "error: invalid argument: --no-mmap",  # FC-28
        "error: unknown argument: --mlock",
        "llama-server: unrecognized option '--no-mmap'",
        "server.py: error: unrecognized arguments: --no-mmap",
    ],
    "rpc-not-built": ['error while handling argument "--rpc": RPC not supported in this build'],
    "invalid-device": ['error while handling argument "--device": invalid device: CUDA0'],
    "argument-value": ['error while handling argument "--flash-attn": error: unknown value'],  # FC-29
    "environment-value": ['error while handling environment variable "LLAMA_ARG_THREADS": stoi'],
    "argument-removed": ["the argument has been removed. use --spec-draft-n-max"],
    "no-cache-folder": ["failed to determine cache directory", "HOME environment variable is not set"],  # FC-77
    "bind": ["E srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080"],  # FC-34
    "big-endian": [
        "gguf_init_from_file: this GGUF file is version 50331648 but this software only supports up to version 3"
    ],
    "gguf-version": [
        "gguf_init_from_file: this GGUF file is version 5 but this software only supports up to version 3"
    ],
    "bad-magic": ["gguf_init_from_file: invalid magic characters: '<!DO', expected 'GGUF'", "failed to read magic"],
    "truncated-model": [
        "tensor 'blk.3.ffn_up.weight' data is not within the file bounds, model is corrupted or incomplete"
    ],
    "unknown-type": [
        "gguf_init_from_file: tensor 'output.weight' has invalid ggml type 40. should be in [0, 41)"
    ],  # B-07
    "unknown-architecture": ["error loading model: unknown model architecture: 'clip'"],  # FC-52
    "missing-tensor": [
        "error loading model: missing tensor 'blk.0.attn_q.weight'",
        "wrong number of tensors; expected 291",
    ],
    "split-model": [
        "illegal split file idx: 1 (file: m-00002-of-00003.gguf), model must be loaded with the first split"
    ],
    "no-vocabulary": ["cannot find tokenizer vocab in model file", "key not found in model: llama.context_length"],
    "damaged-model": [
        "llama_model_load: error loading model: check_tensor_dims: tensor 'blk.0.attn_q.weight' not found",
        "llama_model_load: error loading model: check_tensor_dims: tensor 'x' has wrong shape; expected 1, 2, got 2, 1",
        "llama_model_load: error loading model: error loading model hyperparameters: key llama.x has wrong type u32",
        "gguf_init_from_reader: failed to read tensor info",
        "read: string length 99 exceeds remaining file size 3 bytes",
    ],
    "quantized-v-needs-flash": ["quantized V cache was requested, but this requires Flash Attention"],
    "mmproj-missing": ["srv  load_model: failed to load multimodal model, 'mmproj.gguf'"],  # FC-61
    "chat-template": ["common_chat_templates_init: failed to initialize chat template"],  # FC-35
    "cuda-buffer-oom": [  # B-01, B-02, B-06
        "alloc_buffer: allocating 1536.00 MiB on device 0: cudaMalloc failed: out of memory",
        "error loading model: unable to allocate CUDA0 buffer",
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 734003200",
    ],
    "kv-oom": ["failed to initialize the context: failed to allocate buffer for kv cache"],  # B-29
    "compute-oom": [
        "graph_reserve: failed to allocate compute buffers",
        "failed to allocate compute pp buffers",
    ],  # B-03
    "cuda-oom": ["CUDA error: out of memory"],  # B-10 without its second line, B-45
    "mlock": ["warning: failed to mlock 1048576-byte buffer (after locking 0 bytes): Cannot allocate memory"],
    "host-oom": [
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "E ggml_aligned_malloc: insufficient memory (attempted to allocate  12.50 MB)",  # seen under ulimit -v
    ],
    "no-threads": ["  what():  Resource temporarily unavailable"],  # seen under ulimit -v
    "kernel-oom-cgroup": ["Memory cgroup out of memory: Killed process 815 (llama-server) total-vm:2097152kB"],  # B-26
    "kernel-oom": [  # B-27, B-53
        "Out of memory: Killed process 4711 (llama-server) total-vm:9437184kB, anon-rss:1208kB",
        "Out of memory: Kill process 77 (llama-server) score 900 or sacrifice child",
    ],
    "gpu-firmware": [
        "nvgpu: 17000000.gpu nvgpu_acr_wait_for_completion:141 [ERR] flcn-2: HS ucode boot failed, err 2a"
    ],
    "xid": ["NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."],
    "cublas-internal": ["CUDA error: an internal operation failed", "CUBLAS_STATUS_NOT_INITIALIZED"],  # B-22, B-41
    "illegal-access": ["CUDA error: an illegal memory access was encountered"],  # FC-40
    "flash-attention-fatal": ["/src/ggml/src/ggml-cuda/fattn.cu:95: fatal error"],  # B-38
    "cuda-error": ["CUDA error: the launch timed out and was terminated"],
    "rpc-lost": ["/s/ggml-rpc/ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response"],
    "rpc-bind": ["Failed to create server socket"],
    "rpc-device": ["error: unknown device: CUDA7"],
    "rpc-version": ["RPC server version mismatch: 3.6.1"],
    "rpc-unreachable": [
        "/s/ggml-rpc/ggml-rpc.cpp:547: Failed to connect to 10.0.0.2:50052",
        "/s/ggml-rpc/ggml-rpc.cpp:550: RPC handshake failed for 10.0.0.2:50052",
    ],
    "assertion": [
        "ggml.c:1234: GGML_ASSERT(n_dims == 2) failed",
        'GGML_ASSERT: ggml-cuda.cu:261: !"CUDA error"',
    ],  # B-39
    "router-mode": ["starting router server, no model will be loaded in this process"],
    "model-file-missing": ["gguf_init_from_file: failed to open GGUF file 'x.gguf' (No such file or directory)"],
    "io-error": ["read error: Input/output error"],
    "no-space": ["write failed: No space left on device"],
    "start-failed": ["E srv    load_model: failed to load model, 'x.gguf'"],
}


def _first(text: str) -> str | None:
    """The cause as the supervisor finds it: the table's order decides."""
    return next((s["id"] for s in _TABLE["signatures"] if re.search(s["pattern"], text)), None)


def test_every_signature_has_a_line_here() -> None:
    assert [signature["id"] for signature in _TABLE["signatures"]] == list(LINES)
    assert len(LINES) >= 30


@pytest.mark.parametrize("identity", list(LINES))
def test_signature(identity: str) -> None:
    for line in LINES[identity]:
        assert _first(line) == identity


# Errors of the pinned loader that say nothing of the file: parts of a line, and by whom they are met.
BY_THE_GENERAL_RULE = {
    "bad_alloc": "memory: the engine prints or dies of it elsewhere, and a start that follows may have more",
    "memory size overflow": "the same",
    "ggml context": "the same",
    "failed to create tensors": "the same",
    "failed to open": "permissions and paths are checked before a start",
    "failed to write": "no engine of ours writes models",
    "fputc": "the same",
    "fwrite": "the same",
    "write bytes": "the same",
    "write error": "the same",
    "mmap failed": "memory or the file system: a start that follows may pass",
    "mmap not supported": "a build for another system",
    "MapViewOfFile": "Windows",
    "CreateFileMapping": "Windows",
    "posix_memalign": "memory",
    "seek error": "the disk: a start that follows may pass",
    "ftell error": "the same",
    "no CPU backend": "a broken build: the engine is proven when it is built",
    "no backends are loaded": "the same",
    "buffer type": "the same",
    "backend reg": "the same",
    "split buffers": "the same",
    "tensor info mapping": "the same",
    "main_gpu": "edgellm gives devices",
    "SPLIT_MODE_TENSOR": "edgellm gives no such mode",
    "attempt to override": "edgellm overrides no metadata",
    "too many tokens": "of a request",
    "tokenization result": "of a request",
    "file is NULL": "of the library's callers",
    "out metadata": "the same",
    "list of splits": "the same",
    "extremely large": "the byte order: the line has `failed to load model`",
    "failed to load model": "the last of several lines",
    "error loading model: some": "the frame of the others",
    "error loading model hyperparameters: ": "the same",
    "error loading model vocabulary: ": "the same",
    "unknown model architecture: '": "the name follows: unknown-architecture",
}


def loader_lines() -> list[str]:
    found: dict[str, list[str]] = json.loads(loader_errors.KNOWN.read_text())
    assert set(found) == set(loader_errors.FILES)
    return [line for lines in found.values() for line in lines]


@pytest.mark.parametrize("line", loader_lines())
def test_every_error_of_the_loader_is_a_cause_or_listed(line: str) -> None:
    """A tensor that is "not found" restarted eight times: a file that is at fault stays at fault."""
    identity = _first(f"0.00.100.000 E {line}")
    if identity in (None, "start-failed"):
        assert any(part in line for part in BY_THE_GENERAL_RULE)
        return
    signature = next(each for each in _TABLE["signatures"] if each["id"] == identity)
    assert signature["permanent"] or identity in ("io-error", "cuda-buffer-oom")


def test_every_listed_error_is_one_of_the_loader() -> None:
    lines = loader_lines()
    assert len(lines) > 120
    assert [part for part in BY_THE_GENERAL_RULE if not any(part in line for line in lines)] == []


def test_special_before_general() -> None:
    log = "\n".join(
        [
            "NvMapMemAllocInternalTagged: 1074810371 error 12",
            "alloc_buffer: allocating 1.00 MiB on device 0: cudaMalloc failed: out of memory",
            "E srv    load_model: failed to load model, 'x.gguf'",
        ]
    )
    assert _first(log) == "nvmap-refused"  # B-01: not "out of memory", not "bad file"
    vmm = "CUDA error: out of memory\n  cuMemAddressReserve(&pool_addr, CUDA_POOL_VMM_MAX_SIZE, 0, 0, 0)"
    assert _first(vmm) == "vmm-reserve"  # B-10, FC-11: not "use a smaller model"


def test_an_innocent_start_matches_no_signature() -> None:
    for line in (
        "0.00.211.400 I cmn  common_param:   - CUDA0   : Orin (7500 MiB, 6100 MiB free)",
        "0.00.301.007 I common_fit_params: successfully fit params to free device memory",
        "0.00.412.033 I load_tensors: offloaded 33/33 layers to GPU",
        "0.01.120.500 I sched_reserve:      CUDA0 compute buffer size =   96.50 MiB",
        "0.01.500.250 I srv  llama_server: model loaded",
        "0.00.211.900 W srv  llama_server: security: no API key is set and CORS allows all origins",
    ):
        assert _first(line) is None, line


def test_kinds_and_hints_are_whole() -> None:
    for signature in _TABLE["signatures"]:
        assert set(signature) <= {"id", "pattern", "kind", "hint", "permanent", "oom", "serves", "device", "template"}
        assert re.fullmatch(r"[a-z_]+", signature["kind"])
        assert len(signature["hint"]) > 10 and not signature["hint"].endswith(".")
        assert not (signature["permanent"] and signature["oom"]), "less memory may cure an OOM"


GATES = {
    "driver": [
        "- CUDA0   : NVIDIA H100 (81559 MiB, 80990 MiB free)",
        "ggml_cuda_init: found 1 CUDA devices:",
        "ggml_cuda_init: found 1 CUDA devices (Total VRAM: 30536 MiB):",
        "ggml_init_cublas: found 1 CUDA devices:",
    ],
    "context": [
        "- CUDA0   : Orin (30500 MiB, 28111 MiB free)",
        "llama_model_load_from_file_impl: using device CUDA0 (Orin) - 15870 MiB free",
        "llama_prepare_model_devices: using device CUDA0 (NVIDIA Thor) (0000:01:00.0) - 98304 MiB free",
    ],
    "backend": ["load_tensors: offloaded 29/29 layers to GPU", "llm_load_tensors: offloaded 21/22 layers to GPU"],
    "weights": ["llama_context: constructing llama_context", "llama_new_context_with_model: n_ctx      = 512"],
    "kv_cache": [
        "llama_kv_cache: size =   24.00 MiB (  1024 cells,  30 layers,  1/1 seqs), K (f16):   12.00 MiB",
        "llama_kv_cache_unified: size =  512.00 MiB (  4096 cells,  28 layers,  1 seqs)",
        "llama_kv_cache_init:      CUDA0 KV buffer size =  1024.00 MiB",
        "llama_kv_cache_init: VRAM KV buffer size =     6,25 MiB",  # a decimal comma
    ],
    "warm": ["srv  llama_server: model loaded", "main: model loaded"],
}


def test_every_gate_opens_in_every_era() -> None:
    assert list(_TABLE["gates"]) == list(GATES)
    for gate, lines in GATES.items():
        for line in lines:
            assert any(re.search(pattern, line) for pattern in _TABLE["gates"][gate]), (gate, line)


def test_gate_evidence_is_named() -> None:
    match = re.search(_TABLE["gates"]["backend"][0], "load_tensors: offloaded 20/33 layers to GPU")
    assert match is not None
    assert match.groupdict() == {"offloaded": "20", "layers": "33"}
    device = re.search(_TABLE["facts"]["device"][0], "  - CUDA0   : NVIDIA GH200 (Grace) (97871 MiB, 96000 MiB free)")
    assert device is not None
    assert device["name"] == "NVIDIA GH200 (Grace)"


def test_facts_are_read_with_and_without_the_function_that_prints_them() -> None:
    """Builds of 2026 put a component and the function before a line, those of May the function, older ones nothing."""
    for fact, line in (
        ("device", "- CUDA0   : Orin (30500 MiB, 29100 MiB free)"),
        ("device", "- RPC0    : 127.0.0.1:50052 (24105 MiB, 24105 MiB free)"),
        ("cpu", "- CPU     : AMD EPYC (24105 MiB, 24105 MiB free)"),
        ("archs", "system_info: n_threads = 8 (n_threads_batch = 8) / 8 | CUDA : ARCHS = 870 | NO_VMM = 1"),
        ("answers", "Device 0: Orin, compute capability 8.7, VMM: yes"),
    ):
        wanted = _TABLE["facts"][fact]
        patterns = [wanted] if isinstance(wanted, str) else wanted
        begins = ["", "common_params_print_info: ", "cmn  common_param: "]
        for begin in begins if fact == "archs" else [*begins, "  ", "cmn  common_param:   "]:
            assert any(re.search(pattern, begin + line) for pattern in patterns), (fact, begin)
