"""The object that `/v1/responses` answers with, whole or at the ends of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.answer_parser import Answer
from inferencex.runtime.server.openai.logprobs import chat_logprobs
from inferencex.runtime.server.openai.protocol.chat import TokenLogprob
from inferencex.runtime.server.openai.protocol.responses import (
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseMaker:
    """Makes the objects of one request, which all repeat what was asked for."""

    def __init__(self, body: ResponsesRequest, generation: Generation, request_id: str) -> None:
        self._body = body
        self._generation = generation
        self._request_id = request_id
        self._num_items = 0

    def new_id(self, kind: str) -> str:
        """Return an id for the next item of the output: `msg`, `fc` or `rs`."""
        self._num_items += 1
        return f"{kind}_{self._request_id}_{self._num_items}"

    def make(
        self, status: Status, items: Sequence[OutputItem] = (), output: RequestOutput | None = None, **others: Any
    ) -> ResponseObject:
        """Return the object; with `output`, the status is what became of it."""
        body, params = self._body, self._generation.params
        if output is not None and output.outputs[0].finish_reason == "length":
            status = "incomplete"
            others["incomplete_details"] = IncompleteDetails(reason="max_output_tokens")
        wanted = None if body.text is None else body.text.format
        choice = body.tool_choice
        effort = None if body.reasoning is None else body.reasoning.effort
        return ResponseObject(
            id=f"resp_{self._request_id}",
            created_at=self._generation.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._generation.model.name,
            output=list(items),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": effort, "summary": None},
            temperature=params.temperature,
            text={
                "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
            },
            tool_choice=choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            tools=[tool.model_dump() for tool in body.tools or []],
            top_p=params.top_p,
            usage=None if output is None else self._usage(output, items),
            user=body.user,
            metadata=body.metadata or {},
            **others,
        )

    def items(self, answer: Answer, output: RequestOutput) -> list[OutputItem]:
        """Return the output of an answer that is whole."""
        status: ItemStatus = "incomplete" if output.outputs[0].finish_reason == "length" else "completed"
        items: list[OutputItem] = []
        if answer.reasoning is not None:
            text = ReasoningText(text=answer.reasoning)
            items.append(ReasoningItem(id=self.new_id("rs"), content=[text], status=status))
        if answer.content is not None:
            text_part = OutputText(text=answer.content, logprobs=self.logprobs(output))
            items.append(OutputMessage(id=self.new_id("msg"), status=status, content=[text_part]))
        for call in answer.calls:
            items.append(
                FunctionCall(
                    id=self.new_id("fc"),
                    call_id=call.id,
                    name=call.name,
                    arguments=call.arguments,
                    status="completed",
                )
            )
        return items

    def logprobs(self, output: RequestOutput) -> list[TokenLogprob]:
        """Return the log-probabilities of the answer's tokens, none where they were not asked for."""
        answer, tokenizer = output.outputs[0], self._generation.model.tokenizer
        if answer.logprobs is None or tokenizer is None:
            return []
        return chat_logprobs(tokenizer, answer.logprobs, answer.token_ids, self._body.top_logprobs or 0)

    def _usage(self, output: RequestOutput, items: Sequence[OutputItem]) -> ResponsesUsage:
        tokenizer = self._generation.model.tokenizer
        thought = "".join(part.text for item in items if isinstance(item, ReasoningItem) for part in item.content)
        prompt, written = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        reasoning = len(tokenizer.encode(thought, False)) if thought and tokenizer is not None else 0
        return ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=output.num_cached_tokens),
            output_tokens=written,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=min(reasoning, written)),
            total_tokens=prompt + written,
        )
