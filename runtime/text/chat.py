"""Chat templates: a conversation to the text that the model was trained on, as `transformers` renders it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferencex.formats.errors import BundleError, RequestError
from inferencex.runtime.text.side_files import read_json_object, read_text
from inferencex.runtime.text.special_tokens import CONFIG_FILE
from inferencex.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat templates of one bundle, by name; rendering runs in a sandbox, for templates are foreign code."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Take templates by name, special tokens by attribute, and the clock of templates that write the date."""
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._environment: jinja2.Environment | None = None
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def load(cls, bundle_dir: Path, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
        """Read the templates of `bundle_dir`; a bundle without any gives an object that is false.

        `chat_template.jinja` and `additional_chat_templates/*.jinja` take the place of those in
        `tokenizer_config.json`, which are one text or a list of named ones. Raises BundleError for files that
        cannot be read; a template that is no valid Jinja is reported when it is used.
        """
        templates: dict[str, str] = {}
        single = bundle_dir / "chat_template.jinja"
        if single.is_file():
            templates["default"] = read_text(single)
        for path in sorted((bundle_dir / "additional_chat_templates").glob("*.jinja")):
            templates[path.name.removesuffix(".jinja")] = read_text(path)
        if not templates:
            templates = _configured(bundle_dir / CONFIG_FILE)
        return cls(templates, tokenizer.special_tokens, now)

    def __bool__(self) -> bool:
        """Whether there is any template."""
        return bool(self._sources)

    @property
    def names(self) -> list[str]:
        """Names of the templates."""
        return sorted(self._sources)

    def source(self, tools: object = None) -> str:
        """Return the text of the template that `render` takes by default, with tools or without; "" for none."""
        return self._sources.get(self._default(tools), "")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation; encode it with `add_special_tokens=False`.

        messages:              objects with `role`, `content` and what else the template knows
        tools:                 JSON schemas of the functions that the model may call
        add_generation_prompt: end with the header of the assistant's turn
        documents:             texts to answer from, for templates that support it
        template:              name of the template; by default `tool_use` when there are tools, else `default`
        variables:             further variables (`enable_thinking=False`); they go before the special tokens

        Raises RequestError when there is no such template, a message is not an object, or the template fails.
        """
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one message")
        name = self._choose(template, tools)
        context = {
            **self._special_tokens,
            **_plain(variables),
            "messages": [_message(message, index) for index, message in enumerate(messages)],
            "tools": _objects(tools, "tools"),
            "documents": _objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        from inferencex.runtime.text.chat_sandbox import TEMPLATE_FAILURES  # Jinja is for those who chat

        try:
            return self._compile(name).render(context)
        except TEMPLATE_FAILURES as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the chat template {name!r} cannot render these messages: {reason}") from error

    def _choose(self, name: str | None, tools: object) -> str:
        if not self._sources:
            raise RequestError(
                "this model has no chat template; send it plain text instead of messages (on the command line: --raw)"
            )
        if name is None:
            name = self._default(tools)
        if name not in self._sources:
            raise RequestError(f"there is no chat template {name!r}; this model has {', '.join(self.names)}")
        return name

    def _default(self, tools: object) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._sources else "default"

    def _compile(self, name: str) -> jinja2.Template:
        if self._environment is None:
            from inferencex.runtime.text.chat_sandbox import sandbox

            self._environment = sandbox(self._now)
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
        return self._compiled[name]


def _configured(path: Path) -> dict[str, str]:
    """Return the templates that `tokenizer_config.json` carries."""
    value = read_json_object(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise BundleError(f"{path}: chat_template is neither a text nor a list of named templates")
    return value


def _objects(values: Sequence[Mapping[str, Any]] | None, what: str) -> list[Any] | None:
    if values is None:
        return None
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{what}[{index}] is a {type(value).__name__}, expected an object")
    return [_plain(value) for value in values]


def _message(message: Message, index: int) -> dict[str, Any]:
    """Return a message as templates expect it: keys without a value left out, reasoning under each of its names."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] is a {type(message).__name__}, expected an object with role and content")
    plain: dict[str, Any] = {key: value for key, value in _plain(message).items() if value is not None}
    for field in _REASONING_FIELDS:
        if field in plain:
            return {"thinking": plain[field], **plain, "reasoning_content": plain[field]}
    return plain


def _plain(value: Any) -> Any:
    """Copy JSON-like data; templates see no other objects, since the sandbox cannot know what their methods do."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise RequestError(f"chat messages are texts, numbers, lists and objects; found a {type(value).__name__}")
