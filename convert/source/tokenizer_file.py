"""tokenizer.json for checkpoints that publish only an older form of their tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inferencex.formats.errors import SourceError


def convert_tokenizer(directory: Path, destination: Path, *, name: str, trust_remote_code: bool) -> str | None:
    """Write `destination/tokenizer.json` from whatever tokenizer files `directory` holds.

    Returns None, or the reason why this tokenizer has no such form. Raises SourceError when transformers cannot
    load the tokenizer, or would have to run the checkpoint's own code while `trust_remote_code` is off.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for damaged files
        raise SourceError(
            f"{name}: transformers cannot load its tokenizer ({error}); if it is defined by Python code inside the "
            "checkpoint, read that code, then pass --trust-remote-code if you trust it"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        return f"{name}: its tokenizer ({kind}) has no tokenizer.json form: its bundle takes token ids, not text"
    tokenizer.backend_tokenizer.save(str(destination / "tokenizer.json"), pretty=False)
    return None
