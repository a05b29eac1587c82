"""A temporary folder that lives exactly as long as the object that names it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path


class Scratch:
    """A new folder at `path`, removed with this object or, at the latest, when the process ends in order."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="inferencex-source-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
