"""What is wrong with a JSON body that a parser would take, or would not survive."""

from __future__ import annotations

import json
import re

from inferencex.runtime.server.errors import InvalidRequest

MAX_PARTS = 50_000
"""Strings, names of fields included, and brackets of one body: each costs more than its bytes where it is read, and
nobody else is served meanwhile. A conversation of some thousand messages has fewer."""

# Strings as a whole (one that does not end goes on to the end), or one bracket.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_LATE_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]")


def check_json(body: bytes, max_depth: int) -> None:
    """Raise InvalidRequest for a body that is not UTF-8, has too many parts, is nested too deeply, or escapes half a
    character.

    Whether it is JSON at all is left to the parser, which can say where it is not.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    depth = 0
    for number, token in enumerate(_TOKENS.finditer(body)):
        if number >= MAX_PARTS:
            raise InvalidRequest(f"the body has more strings, objects and lists than this server takes ({MAX_PARTS})")
        first = body[token.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise InvalidRequest(f"the body is nested deeper than the {max_depth} levels that this server takes")
        elif first in b"]}":
            depth -= 1
    if _ESCAPED_SURROGATE.search(body) or _LATE_SURROGATE.search(body):
        _check_characters(body)


def _check_characters(body: bytes) -> None:
    """Refuse texts with a lone surrogate: they are no characters, and cannot be encoded again."""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(r"the body escapes half of a surrogate pair, such as \ud83d, which is no text") from None
    except (ValueError, RecursionError):
        return  # no JSON: the parser will say so
