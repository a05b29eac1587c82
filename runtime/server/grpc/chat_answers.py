"""Answers of Chat: text parted into content, reasoning and calls, as messages of `inference.proto`."""

from __future__ import annotations

from inferencex.runtime.outputs import CompletionDelta, CompletionOutput, RequestOutput
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.grpc.answers import finish_reason, position_logprobs, set_stop_reason, usage
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.openai.answer_parser import AnswerEvent, AnswerParser, Reasoning
from inferencex.runtime.server.openai.chat import read_answer
from inferencex.runtime.server.openai.conversation import Conversation
from inferencex.runtime.server.tools import CallArguments, CallStart, Text


def chat_response(chat: Conversation, generation: Generation, output: RequestOutput) -> pb.ChatResponse:
    """Return the whole answer of Chat."""
    return pb.ChatResponse(
        id=generation.request_id,
        model=generation.model.name,
        created=generation.created,
        choices=[_choice(chat, generation, each) for each in output.outputs],
        usage=usage(output),
        prompt_logprobs=position_logprobs(output.prompt_logprobs, generation.params.prompt_logprobs),
    )


class ChatDeltas:
    """Turns the deltas of one request into those of its answers."""

    def __init__(self, chat: Conversation, generation: Generation) -> None:
        self._num_logprobs = generation.params.logprobs
        self._parsers = [chat.parser(generation) for _ in range(generation.params.n)]

    def message(self, delta: CompletionDelta) -> pb.ChatDelta | None:
        """Return what a delta adds to its answer; None when that is nothing yet."""
        parser = self._parsers[delta.index]
        message = pb.ChatDelta(index=delta.index, logprobs=position_logprobs(delta.logprobs, self._num_logprobs))
        if parser is None:
            message.content = delta.text
        else:
            for event in _events(parser, delta):
                _add(message, event)
        if delta.finish_reason is not None:
            calls = parser is not None and parser.has_calls
            message.finish_reason = _reason(delta.finish_reason, calls)
            set_stop_reason(message, delta.stop_reason)
        elif not (message.content or message.reasoning_content or message.tool_calls or message.logprobs):
            return None
        return message


def _events(parser: AnswerParser, delta: CompletionDelta) -> list[AnswerEvent]:
    events = parser.push(delta.text)
    return events if delta.finish_reason is None else events + parser.finish()


def _add(message: pb.ChatDelta, event: AnswerEvent) -> None:
    if isinstance(event, Text):
        message.content += event.text
    elif isinstance(event, Reasoning):
        message.reasoning_content += event.text
    elif isinstance(event, CallStart):
        message.tool_calls.add(index=event.index, id=event.id, name=event.name)
    elif isinstance(event, CallArguments):
        message.tool_calls.add(index=event.index, arguments=event.text)
    else:
        message.tool_calls.add(index=event.index, broken=True)


def _choice(chat: Conversation, generation: Generation, output: CompletionOutput) -> pb.ChatChoice:
    answer = read_answer(chat, generation, output.text)
    calls = [pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in answer.calls]
    choice = pb.ChatChoice(
        index=output.index,
        message=pb.ChatMessage(
            role="assistant", content=answer.content, reasoning_content=answer.reasoning, tool_calls=calls
        ),
        logprobs=position_logprobs(output.logprobs, generation.params.logprobs),
        finish_reason=_reason(output.finish_reason, bool(calls)),
    )
    set_stop_reason(choice, output.stop_reason)
    return choice


def _reason(reason: str, calls: bool) -> pb.FinishReason:
    return finish_reason("tool_calls" if calls and reason == "stop" else reason)
