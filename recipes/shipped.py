"""The recipes that ship with the package, found by name."""

from __future__ import annotations

from pathlib import Path

from inferencex.formats.errors import OptionError

FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")


def recipe_file(name: str, folder: Path = FOLDER, option: str = "--recipe") -> Path:
    """Return the path of a recipe: a file as it is named, or else one that is shipped in `folder`.

    Raises OptionError when there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = sorted(each.stem for each in folder.iterdir() if each.suffix in _SUFFIXES)
    if name.removesuffix(".yaml") in shipped:
        return folder / f"{name.removesuffix('.yaml')}.yaml"
    raise OptionError(f"{option} {name}: there is no such file; recipes that are shipped: {', '.join(shipped)}")
