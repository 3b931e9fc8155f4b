"""The keys of edgellm.toml except `[[model]]` and `[set]`, dotted. SECTIONS may stand in a profile too."""

from __future__ import annotations

from edge.profile.fields import Field
from edge.profile.settings import SECTIONS

CONFIG_KEYS: dict[str, Field] = {
    "profile": Field("text", "kind of board: auto, orin, thor, xavier, cuda, multi-gpu, wsl2, cpu, or a file"),
    "listen": Field("texts", "addresses of the API, host:port"),
    "strict": Field("boolean", "refuse to serve when degraded"),
    "insecure": Field("boolean", "serve other machines without a key"),
    "engine": Field("text", "engine id or a llama-server binary; empty is the selected one"),
    "store.dirs": Field("texts", "extra model folders, read only"),
    "memory.reserve": Field("reserve", "memory that stays free, of MemTotal or of a GPU's VRAM, e.g. max(1GiB, 10%)"),
    "gateway.keys_file": Field("text", "file of API keys; empty is keys.toml in the config folder"),
    "gateway.cors_origins": Field("texts", "web origins that may call the API"),
    "gateway.hosts": Field("texts", "extra names the Host header may carry"),
    "gateway.max_body_bytes": Field("size", "largest request body", minimum=1024),
    "gateway.unknown_model": Field("text", "only: any name gets the only model; strict: 404", ("only", "strict")),
    "gateway.queue": Field("integer", "requests in line for a slot of a model before others get 429", minimum=0),
    "gateway.tls_cert": Field("text", "certificate chain, PEM; with it the API speaks TLS"),
    "gateway.tls_key": Field("text", "key of the certificate, PEM"),
    "gateway.access_log": Field("text", "one line a request, in the run folder", ("text", "json", "off")),
    "gateway.log_prompts": Field("boolean", "the access log holds the start of each request's body"),
    "gateway.hold.requests": Field("integer", "requests held while a model loads", minimum=0),
    "gateway.hold.bytes": Field("size", "bytes of bodies held while a model loads", minimum=0),
    "gateway.hold.seconds": Field("number", "longest hold", minimum=0),
    **SECTIONS,
}

MODEL_KEYS: dict[str, Field] = {
    "id": Field("text", "public id of the model"),
    "ref": Field("text", "NAME[:QUANT], a path, hf://, pypi:// or https://"),
    "aliases": Field("texts", "other ids that mean this model"),
    "preload": Field("boolean", "load at start"),
    "ttl_s": Field("number", "idle seconds until it sleeps; 0 is never", minimum=0),
    "priority": Field("integer", "higher is planned first and evicted last"),
    "pin": Field("boolean", "never evict"),
    "warm_at": Field("text", "time of day, HH:MM, by which it is warm"),
    "role": Field("text", "what it serves", ("chat", "embedding", "rerank")),
}
