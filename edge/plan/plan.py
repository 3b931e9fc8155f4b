"""The plan of a launch: settings, memory and reasons. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from edge.board.board import Board
from edge.engine.engine import Engine
from edge.models.open import ModelFile

WARMUP_IMAGE_TOKENS = 1024  # the most that it takes: an image of 896 pixels with the projectors of Qwen


class Images(Struct, frozen=True):
    """Limits of one image. The warm-up sends a square one, which takes about as long as a prompt of `like_tokens`."""

    compute_bytes: int  # of the projector, for the largest image; the first one allocates them
    max_tokens: int | None  # null: the engine's own limit
    warmup_px: int
    like_tokens: int


class Settings(Struct, frozen=True):
    """Settings of one engine process; `argv` renders them for llama-server, `common_params` for the embedded engine."""

    n_ctx: int  # tokens over all slots, llama.cpp's --ctx-size
    n_parallel: int  # slots
    n_gpu_layers: int  # 0 is CPU only; n_layer + 1 is everything
    kv_type_k: str  # "f16", "q8_0", ...
    kv_type_v: str
    flash_attention: str  # "on" | "off" | "auto"
    load_mode: str  # "none" | "mmap" | "dio"
    n_threads: int
    cache_ram_bytes: int  # llama-server's host prompt cache; 0 is off
    n_batch: int = 2048
    n_ubatch: int = 512
    devices: tuple[str, ...] = ()  # llama.cpp's names: "CUDA0"
    split_mode: str | None = None
    tensor_split: tuple[float, ...] = ()
    role: str = "chat"  # "chat" | "embedding" | "rerank"
    mmproj: str | None = None
    draft_device: str | None = (
        None  # of the drafter: "CUDA1", "none" for the CPU; null: that of the model, or no drafter
    )
    images: Images | None = None  # of a model with a projector for images
    cpu_expert_layers: int = 0  # last layers whose experts stay on the host while all layers are on the GPUs
    ui: bool = False  # llama.cpp's own web page
    rpc: tuple[str, ...] = ()  # rpc-servers that hold layers, host:port: devices RPC0, RPC1, ... in their order
    ctx_checkpoints: int = 0  # snapshots of a slot's window or state, so that a prompt can be reused


class DomainBudget(Struct, frozen=True):
    """Bytes in one memory domain. required = weights + kv + compute + context + prompt_cache + page_cache + claim."""

    available_bytes: int
    reserve_bytes: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    context_bytes: int = 0
    prompt_cache_bytes: int = 0
    page_cache_bytes: int = 0
    claim_bytes: int = 0  # of an engine beside llama.cpp, whose parts are not known

    @property
    def required_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.compute_bytes
            + self.context_bytes
            + self.prompt_cache_bytes
            + self.page_cache_bytes
            + self.claim_bytes
        )

    @property
    def headroom_bytes(self) -> int:
        return self.available_bytes - self.reserve_bytes - self.required_bytes

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0


MemoryBudget = dict[str, DomainBudget]


class SavedPrompts(Struct, frozen=True):
    """Where the prompts of an engine's slots are kept across restarts. `key` identifies what they are valid for."""

    folder: str
    key: str
    limit_bytes: int


class Reason(Struct, frozen=True):
    """Why a setting has its value. `origin` names the layer that set it: profile:orin, flag, planner, ..."""

    subject: str
    value: str
    because: str
    origin: str = "planner"


class EngineOptions(Struct, frozen=True):
    """Options behind those of the plan. `params` are fields of CommonParams; `unknown` are keys this engine lacks."""

    args: tuple[str, ...] = ()
    params: Mapping[str, Any] = {}
    unknown: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()


class ColdStart(Struct, frozen=True):
    """The command of a start that finds less than `below` (0…1) of the model's file in the page cache."""

    load_mode: str
    argv: tuple[str, ...]
    below: float


class LaunchPlan(Struct, frozen=True):
    """One rung. `argv` holds the placeholder `{socket}`; `env` is the child's whole environment."""

    rung: int
    settings: Settings
    budget: MemoryBudget
    argv: tuple[str, ...]
    env: dict[str, str]
    reasons: tuple[Reason, ...] = ()
    model: ModelFile | None = None  # of this rung where it differs from the requested one
    warnings: tuple[str, ...] = ()  # options that this engine does not know
    saved_prompts: SavedPrompts | None = None
    args: tuple[str, ...] = ()  # the operator's own options of the engine, as written
    own_sleep_s: int = 0  # idle seconds after which the engine sleeps by itself; 0: it does not
    options: EngineOptions = EngineOptions()  # in `argv` behind those that `settings` give
    cold: ColdStart | None = None  # where `edgellm bench load` found another load mode sooner without the page cache

    def argv_at(self, resident: float | None) -> tuple[str, ...]:
        """Return the command of a start with that share of the model's file in the page cache; None: unknown."""
        is_cold = self.cold is not None and resident is not None and resident < self.cold.below
        return self.cold.argv if self.cold is not None and is_cold else self.argv

    @property
    def fits(self) -> bool:
        return all(domain.fits for domain in self.budget.values())


class Ladder(Struct, frozen=True):
    """Launch plans of one model: rung 0 as requested, then with less memory. `chosen`: the first that fits."""

    plans: tuple[LaunchPlan, ...]
    chosen: int


class Measured(Struct, frozen=True):
    """Memory of one start: buffers by the engine's log, the rest by /proc and NVML, None where unknown."""

    what: str = ""  # "Qwen3.5-4B Q5_K_M, 16384 tokens"
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    rss_bytes: int | None = None
    gpu_bytes: int | None = None  # of this process, over all GPUs
    gpu_buffers_bytes: int = 0  # of the buffers, those on GPUs


class OtherEngine(Struct, frozen=True):
    """An engine beside llama.cpp. `ready`: path of its probe; `routes`: paths that it serves, empty for all.

    `claim_bytes`: memory by domain as the configuration states it.
    """

    ready: str
    routes: tuple[str, ...]
    claim_bytes: dict[str, int]

    def corrected(self, measured: Mapping[str, int]) -> dict[str, int]:
        """Return the claim, replaced by what was measured; a domain without a measurement keeps its claim.

        On unified memory a measurement only raises it: a Jetson's kernel counts no GPU memory of a process (FC-20).
        """
        return {
            name: max(claimed, measured.get(name, 0)) if name == "unified" else measured.get(name) or claimed
            for name, claimed in self.claim_bytes.items()
        }


class ModelPlan(Struct, frozen=True):
    """One model of a plan. `model` of another engine names its program and has no tensors."""

    id: str
    aliases: tuple[str, ...]
    model: ModelFile
    ladder: Ladder
    warnings: tuple[str, ...] = ()
    measured: Measured | None = None  # the last start of this engine with this architecture
    takes_turns: bool = False  # it fits only while others sleep, and is started by its first request
    other: OtherEngine | None = None  # served by another engine than llama.cpp


class Plan(Struct, frozen=True):
    """Everything that `up` launches."""

    board: Board
    engine: Engine
    models: dict[str, ModelPlan]
    notes: tuple[str, ...] = field(default=())
