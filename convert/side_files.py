"""Whether a runtime will be able to read the files that go into a bundle beside its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from inferencex.formats.errors import BundleError, SourceError
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.text.chat import ChatTemplate
from inferencex.runtime.text.side_files import read_json_object
from inferencex.runtime.text.tokenizer import Tokenizer

_ADVICE = "; convert the model again"  # what a runtime says, which is what is being done


def check_side_files(files: Mapping[str, Path]) -> None:
    """Read the side files (name in the bundle -> where it is now) as `inferencex.runtime` will.

    Raises SourceError naming the file at fault. A model without tokenizer.json passes: it has no text side.
    """
    if "tokenizer.json" not in files:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.resolve())
        try:
            ChatTemplate.load(folder, Tokenizer.load(folder))
            SamplingParams.from_generation_config(read_json_object(folder / "generation_config.json"))
        except BundleError as error:
            message = str(error).removesuffix(_ADVICE)
            for name, path in files.items():
                message = message.replace(str(folder / name), str(path))
            raise SourceError(message) from error
