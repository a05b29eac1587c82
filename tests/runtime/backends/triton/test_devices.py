"""What is said of GPUs that cannot be used."""

from __future__ import annotations

import os
from importlib import reload
from types import SimpleNamespace

import pytest
import torch

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends import triton as backend
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
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.raises(BackendError, match=message):
        choose_device(DeviceName.parse(asked))


@pytest.mark.parametrize("is_available", [False, True])
def test_what_a_driver_that_does_not_work_says_is_said(monkeypatch: pytest.MonkeyPatch, is_available: bool) -> None:
    """It may say so when it is asked whether it is there, or when it is first used."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(BackendError, match=r"found: none\. .*driver on your system is too old .*VISIBLE_DEVICES=''"):
        choose_device(DeviceName("auto"))


def test_the_cpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(OptionError, match="device='cpu': kernels of this backend run on GPUs; give auto, cuda or rocm"):
        choose_device(DeviceName("cpu"))


@pytest.mark.parametrize(("said", "expected"), [(None, "1"), ("0", "0")])
def test_operations_are_fused_unless_the_environment_says_not(
    monkeypatch: pytest.MonkeyPatch, said: str | None, expected: str
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", said or "")
    if said is None:
        monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    reload(backend)
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == expected
