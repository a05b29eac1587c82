"""A pytest plugin: tests import the native modules of another build, one with sanitizers or for another processor.

INFERENCEX_NATIVE_BUILD=FOLDER python -m pytest -p tests.native.other_build ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

VARIABLE = "INFERENCEX_NATIVE_BUILD"

_PACKAGES = {
    "_cpu": "inferencex.runtime.backends.cpu.native",
    "_quantize": "inferencex.convert.native",
    "_sampler": "inferencex.runtime.engine.native",
}


class _OtherBuild(MetaPathFinder):
    """Finds the native modules that a folder holds; the file's suffix may be another interpreter's."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            f"{package}.{name}": file for name, package in _PACKAGES.items() for file in folder.glob(f"{name}.*so")
        }
        if not self.files:
            raise ImportError(f"{VARIABLE}={folder} holds none of {', '.join(_PACKAGES)}; build them there first")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def pytest_report_header() -> str:
    return f"native modules of {os.environ[VARIABLE]}: {', '.join(sorted(_FINDER.files))}"


_FINDER = _OtherBuild(Path(os.environ[VARIABLE]).resolve())
sys.meta_path.insert(0, _FINDER)
