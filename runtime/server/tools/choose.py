"""Which way of writing tool calls a model was trained on, told from the text of its chat template."""

from __future__ import annotations

from inferencex.runtime.server.tools.base import ToolParser
from inferencex.runtime.server.tools.hermes import OPEN, HermesParser
from inferencex.runtime.server.tools.llama3 import PYTHON_TAG, Llama3Parser
from inferencex.runtime.server.tools.mistral import MARKER, MistralParser

_LLAMA3_INSTRUCTION = '{"name": function name, "parameters":'
_OTHER_TAGGED = ("<arg_key>", "<function=")  # the same tag around something that is no JSON


def parser_class(template: str) -> type[ToolParser] | None:
    """Return the parser for models with this chat template; None when it shows none of the ways known here."""
    if MARKER in template:
        return MistralParser
    if OPEN in template and not any(other in template for other in _OTHER_TAGGED):
        return HermesParser
    if PYTHON_TAG in template or _LLAMA3_INSTRUCTION in template:
        return Llama3Parser
    return None


def takes_tools(template: str) -> bool:
    """Whether the template writes the tools of a request into the prompt at all."""
    return "tools" in template
