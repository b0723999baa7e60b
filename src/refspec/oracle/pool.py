"""As much of a KV pool as kernels see: what the operations that move its rows are tried on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from refspec.oracle.operation import Inputs


class Pool(NamedTuple):
    """Layers of any widths and types, each (slots, width)."""

    layers: list[Tensor]


def layers_of(inputs: Inputs) -> dict[str, Tensor]:
    """The layers among a case's inputs, by name: "layer_0", "layer_1", ..."""
    return {name: tensor for name, tensor in inputs.items() if name.startswith("layer_")}
