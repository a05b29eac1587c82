"""Which folders may be loaded from: what clients name, confined to the roots that the operator chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inferencex.formats.bundle.layout import MANIFEST_FILE
from inferencex.runtime.server.errors import Forbidden, InvalidRequest

_MAX_DEPTH = 3  # of folders below a root that are looked through for bundles
_MAX_LISTED = 1000
_MAX_PATH = 4096  # characters


@dataclass(frozen=True)
class AvailableBundle:
    """A bundle that can be loaded. `name` is what a client gives as its path; `size` is that of its files, in bytes."""

    name: str
    path: Path
    size: int


class BundlePaths:
    """Finds bundles below the given roots, and nowhere else.

    Links are followed before the check, so that none leads out. What the operator gives on the command line does not
    come through here.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(root.resolve() for root in roots)

    def resolve(self, text: str) -> Path:
        """Return the folder of a bundle, given by its name below a root, or by its path.

        Raises Forbidden for what is outside of every root, without saying whether it exists, and InvalidRequest for
        what is no bundle.
        """
        if not self.roots:
            raise Forbidden("this server was started without a model root, so it loads no further models")
        if not text or "\0" in text or len(text) > _MAX_PATH:
            raise InvalidRequest(
                f"path is {text[:80]!r}; expected the name of a bundle below the model root", param="path"
            )
        places = [Path(text)] if Path(text).is_absolute() else [root / text for root in self.roots]
        inside = [place for place in map(_real, places) if place is not None and self._is_inside(place)]
        if not inside:
            raise Forbidden(f"path is {text!r}, which is outside of the folders that models are loaded from")
        for place in inside:
            if _is_bundle(place):
                return place
        raise InvalidRequest(
            f"path is {text!r}, where there is no bundle (a folder with {MANIFEST_FILE}); "
            "GET /v1/admin/bundles lists those that can be loaded",
            param="path",
        )

    def available(self) -> list[AvailableBundle]:
        """Return the bundles below the roots, by name."""
        found: dict[str, AvailableBundle] = {}
        for root in self.roots:
            for folder in self._folders(root, 0):
                name = folder.relative_to(root).as_posix()
                if name not in found and len(found) < _MAX_LISTED:
                    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
                    found[name] = AvailableBundle(name, folder, size)
        return sorted(found.values(), key=lambda bundle: bundle.name)

    def _folders(self, folder: Path, depth: int) -> list[Path]:
        if _is_bundle(folder):
            return [folder] if depth else []
        if depth == _MAX_DEPTH:
            return []
        try:
            children = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
        except OSError:  # a folder that this process may not read holds nothing that it could load
            return []
        found: list[Path] = []
        for child in children:
            real = _real(child)
            if real is not None and self._is_inside(real):
                found += self._folders(child, depth + 1)
        return found

    def _is_inside(self, place: Path) -> bool:
        return any(place != root and place.is_relative_to(root) for root in self.roots)


def _is_bundle(folder: Path) -> bool:
    try:
        return (folder / MANIFEST_FILE).is_file()
    except OSError:  # a name that is too long, or a folder that this process may not enter
        return False


def _real(path: Path) -> Path | None:
    """Return the path without links; None for a loop of links."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None
