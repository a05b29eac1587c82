"""What is said of GPUs that cannot be used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.device_names import DeviceName
from inferencex.runtime.backends.triton.devices import choose_device


@pytest.mark.parametrize(
    ("capability", "asked", "message"),
    [
        ((7, 0), "auto", r"found: none\. cuda:0 Test GPU has compute capability 7\.0, and kernels need 7\.5"),
        ((9, 0), "cuda:3", r"found: cuda:0 Test GPU \(sm_90\)\. torch counts 1, from 0 on"),
    ],
)
def test_the_reason_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], asked: str, message: str
) -> None:
    major, minor = capability
    properties = SimpleNamespace(name="Test GPU", total_memory=1 << 30, major=major, minor=minor)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.raises(BackendError, match=message):
        choose_device(DeviceName.parse(asked))
