"""`tokenizer.json` in the form that loads fastest, which is half the size and half the time of the usual one.

The library behind it saves indented text, with the two parts of every merge as a list of its own. It reads merges
written as `"a b"` too, as it once wrote them, and has much less to parse then. A vocabulary in the order of its texts
goes into its tables faster by a tenth. The tokenizer is the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers


def compact_tokenizer(path: Path) -> bytes:
    """Return the content of a `tokenizer.json` in its compact form; as it is where that would be another tokenizer.

    Raises what `json` and `tokenizers` do for a file that is no tokenizer.
    """
    content = path.read_bytes()
    spec = json.loads(content)
    model = spec.get("model", {})
    merges = model.get("merges")
    if isinstance(merges, list) and all(_has_two_words(merge) for merge in merges):
        model["merges"] = [" ".join(merge) for merge in merges]
    if isinstance(model.get("vocab"), dict):  # where it is a list, its order says which id is whose
        model["vocab"] = dict(sorted(model["vocab"].items()))
    compact = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return compact if _tells_the_same(content, compact) else content


def _has_two_words(merge: object) -> bool:
    """Whether a merge is a list of two parts that can be told apart when they are written as one text.

    A text that begins with "#version" is not read as a merge.
    """
    if not isinstance(merge, list) or len(merge) != 2:
        return False
    first, second = merge
    return bool(first and second) and " " not in first + second and not first.startswith("#version")


def _tells_the_same(content: bytes, compact: bytes) -> bool:
    """Whether both make the same tokenizer, part by part."""
    try:
        return bool(_read(content) == _read(compact))
    except Exception:  # the library raises plain Exception for any defect; a form it does not read is none for a bundle
        return False


def _read(content: bytes) -> str:
    return str(tokenizers.Tokenizer.from_buffer(content).to_str())
