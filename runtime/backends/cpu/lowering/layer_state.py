"""Where the keys and values of all layers lie: block by block, and within a block layer by layer.

A sequence's first block then takes a few hundred kilobytes in one place, not a page of every layer's pool.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.formats.errors import BackendError
from inferencex.formats.records import record
from inferencex.runtime.backends.cpu.native import _cpu
from inferencex.runtime.backends.graph.layer_shapes import LayerShape


@record(frozen=True)
class StateLayout:
    """The memory of a pool.

    offsets:       first byte of each layer within a block
    block_stride:  bytes of a block, all layers together
    """

    offsets: Mapping[int, int]
    block_stride: int

    def nbytes(self, num_blocks: int) -> int:
        """Return the bytes of a pool."""
        return self.block_stride * num_blocks


def layout_of(layers: Mapping[int, LayerShape], block_size: int, kv_dtype: str) -> StateLayout:
    """Lay out blocks of `block_size` tokens. Raises BackendError for sizes that no pool can have."""
    offsets, total = {}, 0
    for layer, shape in layers.items():
        offsets[layer] = total
        try:
            total += _cpu.state_bytes(1, block_size, shape.num_kv_heads, shape.key_width, shape.value_width, kv_dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise BackendError(f"the keys and values of layer {layer}: {error}") from error
    return StateLayout(offsets, total)
