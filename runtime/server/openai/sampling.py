"""From the fields of a request to what the engine takes."""

from __future__ import annotations

import re
from typing import Any

from inferencex.formats.errors import RequestError
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.server.errors import InvalidRequest, invalid
from inferencex.runtime.server.openai.protocol.sampling import SamplingFields

_SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_WITH_DEFAULT = (
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_NAME = re.compile(r"\w+")


def sampling_params(body: SamplingFields, **others: Any) -> SamplingParams:
    """Return the parameters of a request; `others` are those that the endpoint has settled by itself.

    Raises InvalidRequest for values that do not go together.
    """
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    values.update({name: value for name in _WITH_DEFAULT if (value := getattr(body, name)) is not None})
    values.update(
        n=1 if body.n is None else body.n,
        stop=() if body.stop is None else body.stop,
        stop_token_ids=() if body.stop_token_ids is None else body.stop_token_ids,
        logit_bias=_biases(body.logit_bias),
    )
    values.update(others)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        named = _NAME.match(str(error))
        raise invalid(error, named[0] if named and named[0] in type(body).model_fields else None) from error


def _biases(biases: dict[str, float] | None) -> dict[int, float]:
    if biases is None:
        return {}
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(
                f"logit_bias has the key {key[:40]!r}; expected a token id as text, such as '42'", param="logit_bias"
            )
    return {int(key): value for key, value in biases.items()}
