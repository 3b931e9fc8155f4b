"""Which tensors live where: input tables stay on the host, the last layers and the output go to the GPU. Pure.

Source: llama.cpp 0c1e57098, src/llama-model.cpp (load_tensors) and src/llama-arch.cpp (tensor layers).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.model.meta import ModelMeta

# Read row by row on the CPU whatever is offloaded.
_INPUT = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.", "token_embd_norm.")


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes by place. `tied` is an input table that is the output too: kept twice when the output is offloaded."""

    input_bytes: int
    output_bytes: int
    by_layer: tuple[int, ...]
    tied_bytes: int
    largest_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.input_bytes + self.output_bytes + sum(self.by_layer)

    def on_gpu(self, n_gpu_layers: int) -> int:
        """Bytes on the GPU side when the last `n_gpu_layers` of layers + output are offloaded."""
        if n_gpu_layers <= 0:
            return 0
        layers = self.by_layer[max(0, len(self.by_layer) + 1 - n_gpu_layers) :]
        return self.output_bytes + self.tied_bytes + sum(layers)

    def on_host(self, n_gpu_layers: int) -> int:
        if n_gpu_layers <= 0:
            return self.file_bytes
        return self.input_bytes + sum(self.by_layer[: max(0, len(self.by_layer) + 1 - n_gpu_layers)])


def weights(meta: ModelMeta) -> Weights:
    """One pass over the tensors."""
    by_layer = [0] * meta.n_layer
    input_bytes = output_bytes = tied_bytes = largest = 0
    has_output = False
    for tensor in meta.tensors:
        largest = max(largest, tensor.bytes)
        name = tensor.name
        if name.startswith("blk."):
            index = int(name.split(".", 2)[1])
            if index < meta.n_layer:
                by_layer[index] += tensor.bytes
            else:
                output_bytes += tensor.bytes
        elif name.startswith(_INPUT):
            input_bytes += tensor.bytes
            if name == "token_embd.weight":
                tied_bytes = tensor.bytes
        else:
            output_bytes += tensor.bytes
            has_output = has_output or name == "output.weight"
    return Weights(input_bytes, output_bytes, tuple(by_layer), 0 if has_output else tied_bytes, largest)
