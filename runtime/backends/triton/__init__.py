"""The Triton backend: NVIDIA's and AMD's GPUs, from one set of kernels."""

from inferencex.runtime.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
