"""From a chat request to a call, and to how its answers are to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferencex.runtime.server import reasoning
from inferencex.runtime.server.calls import Call, Chat
from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.answer_parser import AnswerParser
from inferencex.runtime.server.openai.context import Context, require_tokenizer
from inferencex.runtime.server.openai.grammars import calls_grammar, requested_grammar
from inferencex.runtime.server.openai.messages import template_messages, template_tools, template_variables
from inferencex.runtime.server.openai.protocol.chat import ChatRequest, NamedToolChoice, Tool
from inferencex.runtime.server.openai.sampling import sampling_params
from inferencex.runtime.server.tools import ToolParser, parser_class
from inferencex.runtime.server.tools.choose import takes_tools
from inferencex.runtime.server.tools.forced import ForcedParser
from inferencex.runtime.text.chat import ChatTemplate


@dataclass(frozen=True)
class Conversation:
    """A chat that is ready to be answered.

    tools:   finds the calls in an answer; None: there can be none
    thinks:  whether reasoning is to be told apart
    """

    call: Call
    tools: type[ToolParser] | None
    functions: tuple[str, ...]
    thinks: bool
    parallel: bool

    def parser(self, generation: Generation) -> AnswerParser | None:
        """Return a new parser for one of the answers; None when an answer is all content."""
        if self.tools is None and not self.thinks:
            return None
        splitter = reasoning.ReasoningSplitter(generation.prompt) if self.thinks else None
        return AnswerParser(splitter, None if self.tools is None else self.tools(self.functions), self.parallel)


def conversation(context: Context, body: ChatRequest, kind: str) -> Conversation:
    """Read a chat request. Raises InvalidRequest for fields that do not go together or that the model cannot honour."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is for streams; set stream to true", param="stream_options")
    model = context.model(body.model)
    require_tokenizer(model, "messages")
    offered = _offered(body, model.chat_template)
    template = model.chat_template.source(offered or None)
    must_call = body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)
    parallel = body.parallel_tool_calls is not False
    grammar = requested_grammar(body)
    tools: type[ToolParser] | None = None
    if must_call and grammar is not None:
        raise InvalidRequest(
            "tool_choice demands a call, and another field a form of the answer; give one of them", param="tool_choice"
        )
    if must_call or (offered and grammar is not None):
        tools = ForcedParser
        grammar = calls_grammar(offered, parallel and not isinstance(body.tool_choice, NamedToolChoice), grammar)
    elif offered:
        tools = parser_class(template)
    own: dict[str, Any] = {}
    if tools is not None and tools.special_markers:
        own["skip_special_tokens"] = False
    call = Call(
        model=f"{model.name}@{model.version}",  # whose template was read; another one may differ
        prompt=Chat(
            messages=template_messages(body.messages, template),
            tools=template_tools(offered) if offered else None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=_continues(body),
            variables=_variables(body),
        ),
        params=sampling_params(body, max_tokens=_max_tokens(body), logprobs=_logprobs(body), **own),
        request_id=context.request_id,
        kind=kind,
        priority=body.priority,
        grammar=grammar,
        stream=bool(body.stream),
        timeout=body.timeout,
        trace_headers=context.trace_headers,
    )
    # A grammar leaves no room for thoughts.
    thinks = grammar is None and reasoning.thinks(template)
    return Conversation(call, tools, tuple(tool.function.name for tool in offered), thinks, parallel)


def _offered(body: ChatRequest, templates: ChatTemplate) -> list[Tool]:
    """Return the tools that the model may use, only the chosen one where one is."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("two tools have the same name; give each its own", param="tools")
    if body.tool_choice == "none":
        return []
    if not tools:
        if body.tool_choice not in (None, "auto"):
            raise InvalidRequest("tool_choice demands a call, and there are no tools; give tools", param="tool_choice")
        return []
    if not takes_tools(templates.source(tools)):
        raise InvalidRequest("this model's chat template does not know tools; leave tools out", param="tools")
    if isinstance(body.tool_choice, NamedToolChoice):
        wanted = body.tool_choice.function.name
        if wanted not in names:
            raise InvalidRequest(
                f"tool_choice names the function {wanted!r}, which is not among the tools", param="tool_choice"
            )
        return [tool for tool in tools if tool.function.name == wanted]
    return tools


def _continues(body: ChatRequest) -> bool:
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on with a message, and add_generation_prompt begins another; give one of them",
            param="continue_final_message",
        )
    return True


def _variables(body: ChatRequest) -> dict[str, Any]:
    variables = template_variables(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def _max_tokens(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
