"""What a user may call a device, told apart without loading a driver."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

from inferencex.formats.errors import OptionError
from inferencex.formats.records import record

Kind = Literal["auto", "cpu", "cuda", "rocm"]

_FORM = re.compile(r"(auto|cpu|cuda|rocm)(?::(\d{1,6}))?", re.ASCII)
_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""What the kernel's drivers of NVIDIA and AMD put there, and Windows' for Linux."""


@record(frozen=True)
class DeviceName:
    """A device as the user names it: `cuda:1` is the kind `cuda` with the index 1; no index means any."""

    kind: Kind
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Read a name. Raises OptionError for one that is none."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None or (match[2] is not None and match[1] in ("auto", "cpu")):
            raise OptionError(f"device={text!r}; expected auto, cpu, cuda, rocm, or one by its number such as cuda:1")
        return cls(match[1], None if match[2] is None else int(match[2]))  # type: ignore[arg-type]

    @property
    def is_gpu(self) -> bool:
        """Tell whether it can only be a GPU."""
        return self.kind in ("cuda", "rocm")

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that say which GPUs a process sees."""


def kernels_are_interpreted() -> bool:
    """Tell whether the environment asks Triton to run kernels in its interpreter, on the CPU: `TRITON_INTERPRET=1`."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def may_have_gpu() -> bool:
    """Tell whether a look for GPUs, which imports torch, can find any: there is a driver, and there are packages."""
    return any(node.exists() for node in _NODES) and all(
        importlib.util.find_spec(package) is not None for package in ("torch", "triton")
    )
