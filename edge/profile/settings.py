"""The keys of a profile's wishes: kind, limits and meaning. The JSON Schema is made of this table."""

from __future__ import annotations

from edge.profile.fields import Field

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0")

SETTINGS: dict[str, Field] = {
    "quant": Field("text", "the quantization wanted, e.g. Q5_K_M"),
    "prefer": Field(
        "text",
        "quality takes a larger quantization when there is room, speed a smaller one",
        ("balanced", "quality", "speed"),
    ),
    "n_ctx": Field(
        "integer",
        "context wanted, in tokens over all slots; 0 is what the model was trained for",
        minimum=0,
        maximum=1 << 24,
    ),
    "n_ctx_min": Field("integer", "the smallest context a slot may get", minimum=256, maximum=1 << 24),
    "n_parallel": Field("integer", "slots: requests worked on at once", minimum=1, maximum=256),
    "backend": Field("text", "what the engine must have", ("any", "cuda", "cpu")),
    "offload": Field("text", "which layers go to the GPU", ("full", "none")),
    "partial_offload": Field("boolean", "on discrete GPUs: layers may stay on the host when not all fit"),
    "fallback": Field("text", "what to do when the GPU cannot be used", ("refuse", "cpu")),
    "load_mode": Field("text", "how weights are read; auto decides by board and plan", ("auto", "none", "mmap", "dio")),
    "kv_type_k": Field("text", "type of the K cache", KV_TYPES),
    "kv_type_v": Field("text", "type of the V cache", KV_TYPES),
    "kv_type_min": Field("text", "the smallest KV type the ladder may take", KV_TYPES),
    "flash_attention": Field("text", "flash attention", ("auto", "on", "off")),
    "n_threads": Field("integer", "CPU threads; 0 is one a physical core", minimum=0, maximum=1024),
    "n_batch": Field("integer", "logical batch", minimum=32, maximum=1 << 16),
    "n_ubatch": Field("integer", "physical batch", minimum=32, maximum=1 << 16),
    "cache_ram": Field(
        "size", "cap of the engine's prompt cache and context checkpoints in host memory; 0 is off", minimum=0
    ),
    "split_mode": Field("text", "how several GPUs share a model", ("none", "layer", "row")),
    "tensor_split": Field("numbers", "share of each GPU; empty is by free memory", minimum=0),
    "managed_memory": Field("boolean", "CUDA managed memory (works around NvMap refusals of L4T 36.4.7)"),
    "reserve": Field("reserve", "memory that stays free, e.g. max(1GiB, 10%)"),
    "power_mode": Field("text", "nvpmodel mode wanted; shown by the doctor, never set"),
    "recipe": Field("text", "recipe of `edgellm build`"),
    "min_tokens_s": Field("number", "slower models are not chosen when none is named", minimum=0),
    "warmup_tokens": Field("integers", "prompt lengths warmed while idle", minimum=1, maximum=1 << 16),
    "system_prompt": Field("text", "computed while idle, so that the first user does not wait for it"),
    "nice": Field("integer", "how far the engine stands back for other programs", minimum=0, maximum=19),
    "oom_score_adj": Field("integer", "how readily the kernel ends the engine for memory", minimum=0, maximum=1000),
    "cpus": Field("integers", "processors the engine may use; empty is all", minimum=0, maximum=4095),
}

# Tables that a profile may hold and edgellm.toml overrides.
SECTIONS: dict[str, Field] = {
    "restart.stable_s": Field("number", "seconds of READY after which a start counts as good", minimum=0),
    "restart.backoff_s": Field("numbers", "pauses before the next starts; the last repeats", minimum=0),
    "restart.stall_s": Field("number", "a load that stands still for so long is ended and tried again", minimum=1),
    "restart.wedge_s": Field("number", "an engine that leaves a request without a sign of life is ended", minimum=1),
    "restart.drain_s": Field("number", "how long open requests may take when an engine shall go", minimum=0),
    "restart.term_s": Field("number", "from SIGTERM to SIGKILL", minimum=0),
    "restart.device_attempts": Field("integer", "more starts when the GPU does not come up", minimum=0, maximum=100),
    "telemetry.jtop": Field("text", "read jetson-stats when it is there", ("auto", "off")),
    "telemetry.interval_s": Field("number", "seconds between samples", minimum=0.1, maximum=60),
    "thermal.act": Field("boolean", "hold work back near the throttle point; false only observes"),
    "thermal.max_watts": Field("number", "hold work back above this power", minimum=1),
    "thermal.warn_margin_c": Field("number", "warn this far below the throttle point", minimum=0, maximum=60),
    "thermal.act_margin_c": Field("number", "act this far below the throttle point", minimum=0, maximum=60),
}
