"""What to answer: one request, from a command line or a line of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inferencex.formats.errors import RequestError
from inferencex.runtime.cli.options import with_parameters
from inferencex.runtime.params import SamplingParams

if TYPE_CHECKING:
    from inferencex.runtime.llm import LLM

_FORMS = ("prompt", "messages", "token_ids")


@dataclass(frozen=True)
class RunRequest:
    """A text, a conversation or token ids (exactly one of the three), and how to answer."""

    params: SamplingParams
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    priority: int = 0


def parse_request(record: Mapping[str, Any], params: SamplingParams) -> RunRequest:
    """Read a line's JSON object; what it says about sampling goes before `params`.

    Raises RequestError unless it has exactly one of "prompt", "messages" and "token_ids", each of its type, and
    beside "id", "tools" and "priority" only sampling parameters.
    """
    given = [form for form in _FORMS if form in record]
    if len(given) != 1:
        found = " and ".join(map(repr, given)) if given else "none"
        raise RequestError(f"exactly one of 'prompt', 'messages' and 'token_ids' is needed; found {found}")
    if "tools" in record and given != ["messages"]:
        raise RequestError(f"'tools' go with 'messages', not with {given[0]!r}")
    others = {key: value for key, value in record.items() if key not in (*_FORMS, "id", "tools", "priority")}
    priority = record.get("priority", 0)
    if type(priority) is not int:
        raise RequestError(f"'priority' is {priority!r:.60}, expected an integer (lower ones go first)")
    return RunRequest(
        params=with_parameters(params, others),
        prompt=_text(record.get("prompt")),
        messages=_objects("messages", record.get("messages")),
        token_ids=_ids(record.get("token_ids")),
        tools=_objects("tools", record.get("tools")),
        priority=priority,
    )


def chat_messages(prompt: str, system: str | None) -> list[dict[str, Any]]:
    """Return the conversation that a single prompt stands for."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def encode(llm: LLM, request: RunRequest, raw: bool, system: str | None) -> tuple[str | None, Sequence[int]]:
    """Return the text, where there is one, and the token ids that the model is to continue.

    A prompt is a turn of the user unless `raw`, or the bundle has no chat template. `system` begins every
    conversation that has no system message of its own. Raises RequestError when a
    conversation cannot be rendered, or anything but token ids is asked of a bundle without a tokenizer.
    """
    if request.token_ids is not None:
        return None, request.token_ids
    tokenizer = llm.require_tokenizer()
    messages = request.messages
    if messages is None:
        prompt = request.prompt or ""
        if raw or not llm.chat_template:
            return prompt, tokenizer.encode(prompt)
        messages = chat_messages(prompt, system)
    elif system is not None and not any(message.get("role") == "system" for message in messages):
        messages = [*chat_messages("", system)[:1], *messages]
    text = llm.chat_template.render(messages, tools=request.tools)
    return text, tokenizer.encode(text, add_special_tokens=False)


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"'prompt' is {value!r:.60}, expected a text")


def _ids(value: object) -> list[int] | None:
    if value is None:
        return None
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    raise RequestError(f"'token_ids' is {value!r:.60}, expected a list of token ids")


def _objects(name: str, value: object) -> list[Mapping[str, Any]] | None:
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return value
    raise RequestError(f"{name!r} is {value!r:.60}, expected a list of objects")
