"""Graph passes: from what torch recorded to the IR dialect, each pass one file with one job."""

from inferencex.convert.passes.sequence import Optimized, optimize

__all__ = ["Optimized", "optimize"]
