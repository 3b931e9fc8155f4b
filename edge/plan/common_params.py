"""Render settings as fields of xllamacpp's CommonParams, for the embedded engine: JSON, enum values by name. Pure."""

from __future__ import annotations

from typing import Any

from edge.model.file import ModelFile
from edge.plan.plan import Settings
from edge.units import MIB


def common_params(settings: Settings, model: ModelFile, alias: str) -> dict[str, Any]:
    """Return the fields by name, nested ones dotted. The embedded engine's process adds the socket."""
    return {
        "model.path": model.path,
        "model_alias": [alias],
        "n_ctx": settings.n_ctx,
        "n_parallel": settings.n_parallel,
        "n_gpu_layers": settings.n_gpu_layers,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_ubatch,
        "cache_type_k": settings.kv_type_k,
        "cache_type_v": settings.kv_type_v,
        "flash_attn_type": settings.flash_attention,
        "load_mode": settings.load_mode,
        "n_ctx_checkpoints": settings.ctx_checkpoints,
        "cache_ram_mib": settings.cache_ram_bytes // MIB,
        "cpuparams.n_threads": settings.n_threads,
        "cpuparams_batch.n_threads": settings.n_threads,
        "n_threads_http": 4,
        "kv_unified": False,
        "fit_params": False,
        "ctx_shift": False,
        "warmup": False,
        "verbosity": 4,
        "ui": False,
        "offline": True,
        "use_jinja": settings.role == "chat",
        "endpoint_metrics": True,
        "endpoint_props": True,
        "endpoint_slots": True,
        "embedding": settings.role != "chat",
        "pooling_type": "rank" if settings.role == "rerank" else "unspecified",
        **({"mmproj.path": settings.mmproj} if settings.mmproj else {}),
    }
