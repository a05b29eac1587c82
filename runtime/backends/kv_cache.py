"""Which format keys and values are kept in: what the user asks for, given what the bundle has scales for."""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.formats.errors import OptionError
from inferencex.formats.kv_cache import KVFormat, KVScales


def calibrated_scales(asked: str, found: Mapping[int, KVScales]) -> Mapping[int, KVScales]:
    """Return the scales by layer that `kv_cache_dtype=asked` means to use, of those `found` in the graph; else none.

    `auto` uses what there is, `int8` and `fp8` what there is for this format. Raises OptionError for `fp8` without
    scales, for nothing finds scales for that format while a model runs.
    """
    format_found: KVFormat | None = next((scales.format for scales in found.values()), None)
    if asked == "fp8" and format_found != "fp8":
        has = "no scales for its KV cache" if format_found is None else f"scales for {format_found}"
        raise OptionError(
            f"kv_cache_dtype='fp8' takes scales, and this bundle has {has}; convert the model with --kv-cache fp8, or "
            "use auto, int8, float16, bfloat16 or float32"
        )
    return found if asked in ("auto", format_found) else {}
