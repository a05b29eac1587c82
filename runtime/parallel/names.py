"""The operators that ranks exchange results with. Graphs that have them are made in memory, and never stored."""

PARALLEL_DOMAIN = "inferencex.parallel"
"""Domain of the operators. They are no part of the IR dialect: what a bundle means does not depend on who runs it."""

ALL_REDUCE = "AllReduce"
"""`y = AllReduce(x)`: the sum of every rank's `x`, of equal shapes, added in the order of the ranks."""

ALL_GATHER = "AllGather"
"""`y = AllGather(x; sizes)`: every rank's `x` side by side along the last axis, of which rank `r` has `sizes[r]`."""
