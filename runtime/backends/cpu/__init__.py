"""The CPU backend: the IR lowered to a flat program of native kernels. It needs neither torch nor transformers."""

from inferencex.runtime.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
