"""The tokens that end a text, as a bundle's configuration names them."""

from __future__ import annotations

from pathlib import Path

from inferencex.formats.errors import BundleError
from inferencex.runtime.text.side_files import read_json_object


def configured_eos_token_ids(bundle_dir: Path) -> tuple[int, ...] | None:
    """Return the ids that `generation_config.json`, else `config.json`, names; None when neither names any.

    Raises BundleError for an `eos_token_id` that is neither an id nor a list of ids.
    """
    config = read_json_object(bundle_dir / "config.json")
    text_config = config.get("text_config")
    for path, source in (
        (bundle_dir / "generation_config.json", read_json_object(bundle_dir / "generation_config.json")),
        (bundle_dir / "config.json", config),
        (bundle_dir / "config.json", text_config if isinstance(text_config, dict) else {}),
    ):
        value = source.get("eos_token_id")
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in ids):
            raise BundleError(f"{path}: eos_token_id is {value!r}, expected a token id or a list of token ids")
        return tuple(sorted(set(ids)))
    return None
