"""Groups of input channels that are not neighbours (`g_idx`, `desc_act`, `actorder`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.source.base import TensorHandle
from inferencex.formats.errors import SourceError


def order_of(handle: TensorHandle, group_size: int) -> NDArray[np.int64] | None:
    """Return the input channels, int64 `[K]`, sorted by group; None when they already are.

    `handle` holds the group of every channel. Sorted, groups must have `group_size` channels each, the last one
    perhaps fewer: that is what a scale per group of neighbours needs. Raises SourceError when they do not.
    """
    groups = handle.load().numpy().astype(np.int64)
    channels = len(groups)
    expected = np.arange(channels) // group_size
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        found, counts = np.unique(groups, return_counts=True)
        raise SourceError(
            f"{handle.name}: its groups cannot be made neighbours by reordering input channels: groups "
            f"{found.min()} to {found.max()} of {counts.min()} to {counts.max()} channels, expected groups 0 to "
            f"{expected[-1]} of {group_size}; the tensor is damaged, or of a layout that is not known"
        )
    return order
