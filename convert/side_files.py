"""Whether a runtime will be able to read the files that go into a bundle beside its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from inferencex.formats.errors import BundleError, SourceError
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.text.chat import ChatTemplate
from inferencex.runtime.text.side_files import read_json_object
from inferencex.runtime.text.tokenizer import Tokenizer

_ADVICE = "; convert the model again"  # what a runtime says, which is what is being done


@contextmanager
def side_file_folder(files: Mapping[str, Path]) -> Iterator[Path]:
    """Yield a folder that has the side files as a bundle has them, wherever each of them lies now."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.resolve())
        yield folder


def check_side_files(files: Mapping[str, Path]) -> None:
    """Read the side files (name in the bundle -> where it is now) as `inferencex.runtime` will.

    Raises SourceError naming the file at fault. A model without tokenizer.json passes: it has no text side.
    """
    if "tokenizer.json" not in files:
        return
    with side_file_folder(files) as folder:
        try:
            ChatTemplate.load(folder, Tokenizer.load(folder))
            SamplingParams.from_generation_config(read_json_object(folder / "generation_config.json"))
        except BundleError as error:
            message = str(error).removesuffix(_ADVICE)
            for name, path in files.items():
                message = message.replace(str(folder / name), str(path))
            raise SourceError(message) from error
