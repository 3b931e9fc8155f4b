"""Divide tensors: input tables stay on the host, the last layers and the output go to the GPU. Pure.

Source: llama.cpp 0c1e57098, src/llama-model.cpp (load_tensors) and src/llama-arch.cpp (tensor layers).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.model.meta import ModelMeta
from edge.plan.layers import integer

# Read row by row on the CPU whatever is offloaded.
_INPUT = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.", "token_embd_norm.")


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights. `tied_bytes`: an input table that is the output too: kept twice when offloaded."""

    input_bytes: int
    output_bytes: int
    by_layer: tuple[int, ...]
    tied_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.input_bytes + self.output_bytes + sum(self.by_layer)

    def of(self, share: range) -> int:
        """Return the bytes of these layers on a GPU; the number after the last layer is the output."""
        count = len(self.by_layer)
        output = self.output_bytes + self.tied_bytes if count in share else 0
        return output + sum(self.by_layer[share.start : min(share.stop, count)])


def weights(meta: ModelMeta) -> Weights:
    """Return the bytes of the header's tensors."""
    by_layer, count = [0] * meta.n_layer, meta.n_layer - integer(meta, "nextn_predict_layers")
    input_bytes = output_bytes = tied_bytes = 0
    has_output, decodes = False, meta.arch in ("lfm2", "lfm2moe")
    for tensor in meta.tensors:
        name = tensor.name
        if name.startswith("blk."):
            index = int(name.split(".", 2)[1])
            if index < count:  # later ones predict further tokens; the engine skips them
                by_layer[index] += tensor.bytes
        elif name.startswith(_INPUT):
            input_bytes += tensor.bytes
            if name == "token_embd.weight":
                tied_bytes = tensor.bytes
        else:
            output_bytes += tensor.bytes
            has_output = has_output or name == "output.weight"
            # Without a last norm there is no output to compute: this is an encoder.
            decodes = decodes or name == "output_norm.weight"
    return Weights(input_bytes, output_bytes, tuple(by_layer), tied_bytes if decodes and not has_output else 0)
