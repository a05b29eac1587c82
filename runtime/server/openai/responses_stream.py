"""The events of a streamed `/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pydantic import BaseModel

from inferencex.runtime.outputs import CompletionDelta, RequestOutput
from inferencex.runtime.server.errors import ServiceError
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.answer_parser import AnswerEvent, AnswerParser, Reasoning
from inferencex.runtime.server.openai.logprobs import chat_logprobs
from inferencex.runtime.server.openai.protocol.responses import (
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
)
from inferencex.runtime.server.openai.responses_object import ResponseMaker, Status
from inferencex.runtime.server.openai.sse import compact
from inferencex.runtime.server.tools import CallArguments, CallBroken, CallStart, Text


class ResponseStream:
    """Writes the events of one answer: its items one after the other, each opened, filled and closed."""

    def __init__(self, maker: ResponseMaker, generation: Generation, parser: AnswerParser | None, num_top: int) -> None:
        self._maker = maker
        self._generation = generation
        self._parser = parser
        self._num_top = num_top
        self._number = 0
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the events."""
        output: RequestOutput | None = None
        begun = False
        async for delta in self._generation:
            events = [] if begun else [self._whole("response.created"), self._whole("response.in_progress")]
            begun = True
            events += self._delta(delta)
            if events:
                yield "".join(events).encode("ascii")
            output = delta.output
        if output is None:  # closed early: nobody reads on
            return
        incomplete = output.outputs[0].finish_reason == "length"
        events = [] if self._items else self._opened(self._message())
        events += self._closed("incomplete" if incomplete else "completed", output)
        name = "response.incomplete" if incomplete else "response.completed"
        whole = self._maker.make("completed", self._items, output)
        yield "".join([*events, self._event(name, response=whole)]).encode("ascii")

    def failure(self, error: ServiceError) -> bytes:
        """Return how an error is told after the first event."""
        told = ResponseError(code=error.code or error.type, message=str(error))
        return self._event("response.failed", response=self._maker.make("failed", self._items, error=told)).encode()

    def _delta(self, delta: CompletionDelta) -> list[str]:
        if self._parser is None:
            events: list[AnswerEvent] = [Text(delta.text)] if delta.text else []
        else:
            events = self._parser.push(delta.text)
            if delta.finish_reason is not None:
                events += self._parser.finish()
        return [written for event in events for written in self._written(event, delta)]

    def _written(self, event: AnswerEvent, delta: CompletionDelta) -> list[str]:
        if isinstance(event, Text):
            return self._add_text(event.text, delta)
        if isinstance(event, Reasoning):
            return self._add_reasoning(event.text)
        if isinstance(event, CallStart):
            call = FunctionCall(
                id=self._maker.new_id("fc"), call_id=event.id, name=event.name, arguments="", status="in_progress"
            )
            return self._closed("completed") + self._opened(call)
        if isinstance(event, CallArguments) and isinstance(self._open, FunctionCall):
            self._open.arguments += event.text
            return [self._in_item("response.function_call_arguments.delta", delta=event.text)]
        if isinstance(event, CallBroken):
            return self._closed("incomplete")
        return []

    def _add_text(self, text: str, delta: CompletionDelta) -> list[str]:
        events = []
        if not isinstance(self._open, OutputMessage):
            events = self._closed("completed") + self._opened(self._message())
        message = self._open
        assert isinstance(message, OutputMessage)
        message.content[0].text += text
        logprobs = self._logprobs(delta)
        events.append(self._in_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs))
        return events

    def _add_reasoning(self, text: str) -> list[str]:
        events = []
        if not isinstance(self._open, ReasoningItem):
            thought = ReasoningItem(id=self._maker.new_id("rs"), content=[ReasoningText(text="")], status="in_progress")
            events = self._closed("completed") + self._opened(thought)
        item = self._open
        assert isinstance(item, ReasoningItem)
        item.content[0].text += text
        events.append(self._in_item("response.reasoning_text.delta", content_index=0, delta=text))
        return events

    def _logprobs(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        tokenizer = self._generation.model.tokenizer
        if delta.logprobs is None or tokenizer is None:
            return []
        found = chat_logprobs(tokenizer, delta.logprobs, delta.token_ids, self._num_top)
        return [token.model_dump() for token in found]

    def _message(self) -> OutputMessage:
        return OutputMessage(id=self._maker.new_id("msg"), status="in_progress", content=[OutputText(text="")])

    def _opened(self, item: OutputItem) -> list[str]:
        self._items.append(item)
        self._open = item
        shown = item.model_dump()
        if not isinstance(item, FunctionCall):
            shown["content"] = []
        events = [self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)]
        if not isinstance(item, FunctionCall):
            events.append(self._in_item("response.content_part.added", content_index=0, part=item.content[0]))
        return events

    def _closed(self, status: ItemStatus, output: RequestOutput | None = None) -> list[str]:
        """Close the item that is open, if one is."""
        item = self._open
        if item is None:
            return []
        item.status = status
        events = []
        if isinstance(item, FunctionCall):
            events.append(
                self._in_item("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
            )
        elif isinstance(item, ReasoningItem):
            events.append(self._in_item("response.reasoning_text.done", content_index=0, text=item.content[0].text))
        else:
            part = item.content[0]
            if output is not None:
                part.logprobs = self._maker.logprobs(output)
            logprobs = [token.model_dump() for token in part.logprobs]
            done = self._in_item("response.output_text.done", content_index=0, text=part.text, logprobs=logprobs)
            events.append(done)
        if not isinstance(item, FunctionCall):
            events.append(self._in_item("response.content_part.done", content_index=0, part=item.content[0]))
        events.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=item))
        self._open = None
        return events

    def _whole(self, name: str, status: Status = "in_progress") -> str:
        return self._event(name, response=self._maker.make(status))

    def _in_item(self, kind: str, **fields: Any) -> str:
        item = self._items[-1]
        return self._event(kind, item_id=item.id, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        values = {key: value.model_dump() if isinstance(value, BaseModel) else value for key, value in fields.items()}
        data = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return f"event: {kind}\ndata: {compact(data)}\n\n"
