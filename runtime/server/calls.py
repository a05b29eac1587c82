"""One request as the service sees it, whatever the protocol: what is asked, who asks, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from inferencex.runtime.outputs import Pooling, RequestOutput
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.server.errors import ServiceError

if TYPE_CHECKING:
    from inferencex.runtime.structured import Grammar


@dataclass(frozen=True)
class CallerLimits:
    """What one key may use; None: as much as there is.

    tokens_per_minute: prompt and output tokens together
    """

    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True)
class Caller:
    """Who asks. `priority` is that of requests which name none, and the most urgent that may be named."""

    name: str
    priority: int = 0
    is_admin: bool = False
    limits: CallerLimits = CallerLimits()


ANONYMOUS = Caller("anonymous")


@dataclass(frozen=True)
class Chat:
    """A conversation, to be rendered with the model's chat template.

    continue_final_message: leave the last message open, so that the answer goes on with it
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One prompt to continue.

    model:    name of a served model; None or "": the default one
    kind:     what is called, for metrics and logs: "completions", "chat", "grpc.generate", ...
    priority: lower is more urgent; None: the caller's
    stream:   whether each step's text is wanted; without it only the end is delivered, which is cheaper
    timeout:  seconds; None: the server's default
    pooling:  what becomes of the prompt's hidden states, where its embedding is asked for instead of a continuation
    trace_headers: `traceparent` and `tracestate`, if the client sent them
    """

    model: str | None
    prompt: str | Sequence[int] | Chat
    params: SamplingParams
    request_id: str
    kind: str
    priority: int | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None
    add_special_tokens: bool = True
    stream: bool = False
    timeout: float | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)


Status = Literal["ok", "aborted", "failed", "timeout", "filtered"]


@dataclass
class RequestRecord:
    """What logs, metrics and traces are told of one request.

    seconds: from the call to its end; 0 until then
    status:  "aborted" is what the client or a shutdown ended early
    """

    request_id: str
    model: str
    version: str
    kind: str
    caller: str
    stream: bool = False
    priority: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    status: Status = "ok"
    error: ServiceError | None = None
    output: RequestOutput | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Hears of requests, on the event loop's thread; must be quick and must not raise."""

    def accepted(self, record: RequestRecord) -> None:
        """A request was queued."""

    def rejected(self, record: RequestRecord) -> None:
        """A request was refused before it was queued; `record.error` says why."""

    def finished(self, record: RequestRecord) -> None:
        """A request has ended, one way or the other."""
