"""Which backend a device and a name mean, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends import automatic_backends, select_backend
from inferencex.runtime.backends.device_names import DeviceName


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", DeviceName("auto")),
        ("cpu", DeviceName("cpu")),
        ("cuda", DeviceName("cuda")),
        ("cuda:1", DeviceName("cuda", 1)),
        ("rocm:12", DeviceName("rocm", 12)),
    ],
)
def test_names(text: str, expected: DeviceName) -> None:
    assert DeviceName.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1:2", "cuda:1,2", "cpu:0", "auto:0", "cuda:1 ", 0],
)
def test_what_is_no_name(text: Any) -> None:
    with pytest.raises(OptionError, match="expected auto, cpu, cuda, rocm"):
        DeviceName.parse(text)


def test_the_cpu_is_asked_for(tmp_path: Path) -> None:
    assert select_backend("auto", tmp_path, "cpu").name == "cpu"


@pytest.mark.parametrize(("has_gpu", "first"), [(True, "triton"), (False, "cpu")])
def test_gpus_are_tried_where_there_is_a_driver(has_gpu: bool, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferencex.runtime.backends.may_have_gpu", lambda: has_gpu)
    assert automatic_backends()[0] == first


@pytest.mark.parametrize(("backend", "device"), [("cpu", "cuda"), ("reference", "rocm:0"), ("triton", "cpu")])
def test_a_backend_that_does_not_compute_there_is_refused(backend: str, device: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"the backend '{backend}' computes on"):
        select_backend(backend, tmp_path, device)


def test_a_gpu_that_is_not_there_is_an_error_with_the_reason(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = (
        "from pathlib import Path\n"
        "from inferencex.runtime.backends import select_backend\n"
        f"select_backend('auto', Path({str(tmp_path)!r}), 'cuda')"
    )
    environment = {"PATH": "/usr/bin:/bin"}  # without TRITON_INTERPRET
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "no backend can run this bundle here" in last and "found: none" in last, last


def test_auto_imports_no_torch_where_there_is_no_driver(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        pytest.skip("this machine has a GPU's driver")
    command = (
        "import sys\nfrom pathlib import Path\n"
        "from inferencex.runtime.backends import select_backend\n"
        f"assert select_backend('auto', Path({str(tmp_path)!r})).name == 'cpu'\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize("error", [OSError("libcudart.so.12: no such file"), ImportError("undefined symbol: abc")])
def test_a_gpu_that_is_not_used_is_no_secret(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is a driver, somebody may wonder why everything is slow."""

    def broken(module: str) -> Any:
        if module.endswith("triton"):
            raise error
        return import_module(module)

    monkeypatch.setattr("inferencex.runtime.backends.may_have_gpu", lambda: True)
    monkeypatch.setattr("inferencex.runtime.backends.import_module", broken)
    assert select_backend("auto", tmp_path).name == "cpu"
    assert "runs on the backend cpu, and not on a GPU: the backend 'triton' cannot be loaded: " in caplog.text
    with pytest.raises(BackendError, match=str(error)):
        select_backend("auto", tmp_path, "cuda")


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no backend is called 'cuda'; choose one of: auto, triton, cpu, reference"):
        select_backend("cuda", tmp_path)


def test_backend_errors_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unable:
        name = "unable"

        def supports(self, bundle: Path) -> tuple[str, ...]:
            return ("it is a test",)

    monkeypatch.setattr("inferencex.runtime.backends.load_backend", lambda name: Unable())
    with pytest.raises(BackendError, match="cpu: it is a test"):
        select_backend("cpu", tmp_path)
