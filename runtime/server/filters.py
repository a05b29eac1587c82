"""Hooks that look at the texts of requests and answers, and may refuse them.

A filter is an object with one or both of the methods of `InputFilter` and `OutputFilter`, plain or `async`. It is named
in the configuration (`server.filters`): by the name of an entry point of the group `inferencex.filters`, or as
`module:object`. A class is called without arguments once, at the start.

A method returns None for a text that may pass, or the reason why not, which the client is told (status 400, code
`content_filter`). What it raises is an error of the server (status 500) for that request alone. Plain methods run on
threads, several at once, so that a slow one holds nothing else up; `async` ones run on the server's event loop.

Output is checked as it is generated: the filter sees the whole text of a continuation so far, again and longer with
each step, and what it has not seen is not sent. With `context.finished` the text is whole. Requests that are not
streamed are checked the same way, so a refused answer ends early. Filters run in the order of the configuration, and
the first refusal counts.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.calls import Call, Caller
from inferencex.runtime.server.errors import Failed, InvalidRequest

GROUP = "inferencex.filters"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilterContext:
    """What a filter knows of a request beside the text.

    caller:     name of the key's owner, "anonymous" without a key
    kind:       what is called: "chat", "completions", "grpc.generate", ...
    model:      as the request names it; None for the default model
    request_id: as in the logs and in the header X-Request-Id
    finished:   of output: whether this is the whole text
    """

    caller: str
    kind: str
    model: str | None
    request_id: str
    finished: bool = False


class InputFilter(Protocol):
    """Looks at prompts; those of chats as the model reads them, rendered with its template."""

    def check_input(self, text: str, context: FilterContext) -> str | Awaitable[str | None] | None:
        """Return None to let the prompt pass, or why it may not."""
        ...


class OutputFilter(Protocol):
    """Looks at answers."""

    def check_output(self, text: str, context: FilterContext) -> str | Awaitable[str | None] | None:
        """Return None to let the answer go on, or why it may not."""
        ...


_Check = Callable[[str, FilterContext], Any]


class Filters:
    """The filters of a server, in order."""

    def __init__(self, filters: Sequence[InputFilter | OutputFilter] = ()) -> None:
        """Take the filters. Raises OptionError for an object that has neither method."""
        self._input = _methods(filters, "check_input")
        self._output = _methods(filters, "check_output")
        for item in filters:
            if not any(callable(getattr(item, name, None)) for name in ("check_input", "check_output")):
                raise OptionError(f"the filter {_name(item)} has neither a method check_input nor check_output")

    @property
    def checks_input(self) -> bool:
        """Whether any filter looks at prompts."""
        return bool(self._input)

    @property
    def checks_output(self) -> bool:
        """Whether any filter looks at answers."""
        return bool(self._output)

    async def check_input(self, call: Call, caller: Caller, text: str) -> None:
        """Raise InvalidRequest when a filter refuses a prompt, and Failed when one fails."""
        await _run(self._input, text, FilterContext(caller.name, call.kind, call.model, call.request_id), "prompt")

    async def check_output(self, call: Call, caller: Caller, text: str, finished: bool) -> None:
        """Raise InvalidRequest when a filter refuses an answer so far, and Failed when one fails."""
        context = FilterContext(caller.name, call.kind, call.model, call.request_id, finished)
        await _run(self._output, text, context, "answer")


def load_filters(names: Sequence[str]) -> Filters:
    """Return the filters that a configuration names. Raises OptionError for one that cannot be had."""
    return Filters([_load(name) for name in names])


async def _run(checks: Sequence[_Check], text: str, context: FilterContext, what: str) -> None:
    for check in checks:
        try:
            if inspect.iscoroutinefunction(check):
                reason = await check(text, context)
            else:
                reason = await asyncio.to_thread(check, text, context)
                if inspect.isawaitable(reason):
                    reason = await reason
        except Exception as error:  # of any kind: filters are not ours
            _LOG.exception("request %s: the filter %s failed", context.request_id, _name(check))
            raise Failed(f"the filter {_name(check)} failed", code="filter_failed") from error
        if reason is None:
            continue
        if not isinstance(reason, str):
            _LOG.error("request %s: the filter %s returned %r", context.request_id, _name(check), reason)
            raise Failed(f"the filter {_name(check)} returned neither None nor a text", code="filter_failed")
        raise InvalidRequest(f"the {what} was refused: {reason}", code="content_filter")


def _load(name: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    try:
        if colon:
            found = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
        else:
            installed = {entry.name: entry for entry in entry_points(group=GROUP)}
            if name not in installed:
                there = f"installed are: {', '.join(sorted(installed))}" if installed else "none is installed"
                raise OptionError(f"server.filters: there is no filter {name!r}; {there}; or give module:object")
            found = installed[name].load()
        return found() if inspect.isclass(found) else found
    except OptionError:
        raise
    except Exception as error:  # of any kind: filters are not ours
        raise OptionError(f"server.filters: {name} could not be loaded: {type(error).__name__}: {error}") from error


def _methods(filters: Sequence[object], name: str) -> tuple[_Check, ...]:
    methods = (getattr(item, name, None) for item in filters)
    return tuple(method for method in methods if callable(method))


def _name(item: object) -> str:
    owner = getattr(item, "__self__", item)
    return getattr(owner, "__qualname__", None) or type(owner).__qualname__
