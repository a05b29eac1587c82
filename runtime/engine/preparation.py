"""From what is asked to a request the engine can queue: checked against the model, every default filled in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from inferencex.formats.errors import RequestError
from inferencex.formats.records import record
from inferencex.runtime.backends.base import Executable, HiddenStatesExecutable
from inferencex.runtime.engine import admission
from inferencex.runtime.engine.constraint import ConstraintFactory, SequenceConstraint
from inferencex.runtime.engine.pooling import HiddenStatePool
from inferencex.runtime.engine.sampler import SequenceSampler
from inferencex.runtime.engine.sequence import Request, Status
from inferencex.runtime.engine.sequence import Sequence as EngineSequence
from inferencex.runtime.engine.text_stream import TextStream
from inferencex.runtime.outputs import Pooling, RequestMetrics
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.text.tokenizer import Tokenizer

_GREEDY = SamplingParams(temperature=0.0)


@record(frozen=True)
class Preparation:
    """What requests are checked against. Its methods raise RequestError for one that could never be served."""

    executable: Executable
    limits: admission.Limits
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    default_params: SamplingParams
    shares_prefixes: bool
    clock: Callable[[], float]

    def generation(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams | None,
        prompt: str | None,
        priority: int,
        constraint: ConstraintFactory | None,
    ) -> Request:
        """Return a request for continuations of a prompt."""
        name = f"request {request_id}"
        asked = SamplingParams() if params is None else params
        if not isinstance(asked, SamplingParams):
            raise RequestError(f"{name}: the parameters are {asked!r:.60}; expected SamplingParams")
        admission.check_priority(name, priority)
        if constraint is not None and not callable(constraint):
            raise RequestError(f"{name}: the constraint is {constraint!r:.60}; expected a function that makes one")
        resolved = asked.with_defaults(self.default_params)
        if resolved.stop and self.tokenizer is None:
            raise RequestError(
                f"{name}: stop strings need a tokenizer, and the bundle has no tokenizer; use stop_token_ids"
            )
        tokens = admission.check_prompt(name, token_ids, self.limits)
        admission.check_token_ids(name, resolved, self.limits)
        stop_ids = frozenset(resolved.stop_token_ids)
        request = Request(
            id=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            params=resolved,
            max_tokens=admission.resolve_max_tokens(
                name, len(tokens), asked.max_tokens, resolved.max_tokens, self.limits
            ),
            stop_token_ids=stop_ids if resolved.ignore_eos else stop_ids | self.eos_token_ids,
            priority=priority,
            cache_root=self._cache_root(request_id, len(tokens), resolved.n),
            metrics=RequestMetrics(arrival_time=self.clock()),
            prompt_logprobs=None if resolved.prompt_logprobs is None else [None] * len(tokens),
            is_constrained=constraint is not None,
        )
        for index in range(resolved.n):
            request.sequences.append(
                EngineSequence(
                    request=request,
                    index=index,
                    sampler=SequenceSampler(resolved, index, tokens, request.stop_token_ids),
                    text_stream=None if self.tokenizer is None else TextStream(self.tokenizer, resolved, tokens),
                    token_ids=list(tokens),
                    status=Status.HELD,
                    constraint=None if constraint is None else self._constraint(name, constraint, request),
                )
            )
        return request

    def embedding(
        self,
        request_id: str,
        token_ids: Sequence[int],
        pooling: Pooling,
        normalize: bool,
        prompt: str | None,
        priority: int,
    ) -> Request:
        """Return a request for a prompt's embedding."""
        name = f"request {request_id}"
        if not isinstance(self.executable, HiddenStatesExecutable):
            raise RequestError(
                f"{name}: this model gives no embeddings: its graph does not end in a linear layer, so that the hidden "
                "states in front of it are not known, or its backend does not offer them"
            )
        admission.check_priority(name, priority)
        tokens = admission.check_prompt(name, token_ids, self.limits)
        admission.check_fits(name, len(tokens), self.limits)
        request = Request(
            id=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            params=_GREEDY,
            max_tokens=0,
            stop_token_ids=frozenset(),
            priority=priority,
            cache_root=self._cache_root(request_id, len(tokens), 1),
            metrics=RequestMetrics(arrival_time=self.clock()),
            prompt_logprobs=None,
            pool=HiddenStatePool(name, pooling, normalize),
        )
        sampler = SequenceSampler(_GREEDY, 0, (), ())  # nothing is sampled
        request.sequences.append(EngineSequence(request, 0, sampler, None, list(tokens), Status.HELD))
        return request

    def _constraint(self, name: str, make: ConstraintFactory, request: Request) -> SequenceConstraint:
        return SequenceConstraint(name, make(), request.stop_token_ids, self.eos_token_ids)

    def _cache_root(self, request_id: str, num_tokens: int, n: int) -> Hashable | None:
        independent = self.executable.facts.length_independent_up_to
        return admission.cache_root(request_id, num_tokens, n, self.shares_prefixes, independent)
