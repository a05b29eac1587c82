"""The Triton backend: NVIDIA's and AMD's GPUs, from one set of kernels."""

import os

from inferencex.runtime.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]

# Kernels count on multiplications and additions being fused, which Triton 3.10 does no more unless it is asked to. It
# looks here when it compiles; 3.9 warns where nobody says which it should be.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
