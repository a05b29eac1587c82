"""The public way in: a bundle, and answers to prompts and chats, whole or as they come."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from inferencex.formats.errors import BackendError, BundleError, OptionError, RequestError
from inferencex.runtime.aside import Once
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import Backend, BackendOptions, ProfiledExecutable
from inferencex.runtime.engine.scheduler_options import Policy, SchedulerOptions
from inferencex.runtime.garbage import collection_paused
from inferencex.runtime.heap_room import make_heap_room
from inferencex.runtime.load_options import check_load_options, check_max_model_len
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.prompts import Messages, Prompt, list_conversations, list_prompts, one_each
from inferencex.runtime.text.eos import configured_eos_token_ids
from inferencex.runtime.text.side_files import TOKENIZER_FILE, read_json_object

if TYPE_CHECKING:
    from inferencex.runtime.engine.sequence import Request
    from inferencex.runtime.engine.stats import EngineStats
    from inferencex.runtime.outputs import CompletionDelta, EmbeddingOutput, Pooling, RequestOutput
    from inferencex.runtime.structured import Grammar
    from inferencex.runtime.text.tokenizer import Tokenizer

_HEAP_OF_TOKENIZER = 22  # bytes that are allocated for each one of tokenizer.json, at the most that are in use at once


class LLM:
    """A model that is loaded and ready to answer.

    backend:                "auto", a backend's name, or a Backend
    device:                 "auto", "cpu", "cuda", "rocm", or a GPU by its number such as "cuda:1"; "auto" is a GPU if
                            there is one, for backends that are chosen
    max_model_len:          longest prompt and output together; None: what the model was made for
    max_num_seqs:           most sequences in progress at once
    max_num_batched_tokens: most tokens computed in one step; long prompts are cut into pieces of this size
    kv_cache_memory:        bytes for the KV cache; `num_kv_blocks` sets its size in blocks instead
    block_size:             tokens of a KV block
    enable_prefix_caching:  reuse the KV of equal beginnings of prompts
    scheduling_policy:      "fcfs", or "priority": requests with lower `priority` first
    threads:                threads to compute with; None: one for each physical core this process may use
    pin:                    keep each thread on a core of its own
    activation_dtype:       "auto"; on a CPU how linears with INT4 and INT8 weights read activations, "int8" or
                            "float32"; on a GPU what activations are, "bfloat16", "float16" or "float32"
    kv_cache_dtype:         "auto", "float32", "float16", "bfloat16", "int8", or "fp8" for bundles with scales for it;
                            "auto" is the format that the bundle has calibrated scales for, if any
    gpu_memory_utilization: share of a GPU's memory to use, where neither `kv_cache_memory` nor `num_kv_blocks` is given
    tensor_parallel_size:   processes that divide the model among them, this one included; see docs/parallel.md
    load_tokenizer:         False: leave the tokenizer alone, and serve token ids as a bundle without one does

    A bundle without tokenizer.json serves prompts of token ids: `tokenizer` is None, outputs carry token ids and
    empty texts, and texts, chats and stop strings raise RequestError.

    Raises BundleError, BackendError or OptionError when the bundle cannot be served this way. Calls may come
    from several threads: they take turns step by step, and their requests share the batch. A fork of the process
    cannot use the model (BackendError); it can load the bundle itself.

    `close` gives the memory back, and so does the end of a `with` statement.

    grammars: compiles what `grammar` says for this model, and remembers it
    """

    @collection_paused()
    def __init__(
        self,
        bundle: str | Path,
        *,
        backend: str | Backend = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 1024,
        kv_cache_memory: int | None = None,
        num_kv_blocks: int | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        scheduling_policy: Policy = "fcfs",
        threads: int | None = None,
        pin: bool = False,
        activation_dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        gpu_memory_utilization: float = 0.9,
        tensor_parallel_size: int = 1,
        load_tokenizer: bool = True,
    ) -> None:
        folder = Path(bundle)
        if not folder.is_dir():
            raise BundleError(f"{folder}: is not a folder; a bundle is the folder that inferencex-convert writes")

        def beside() -> Tokenizer | None:
            _import_engine()
            return _load_tokenizer(folder) if load_tokenizer else None

        loading = Once(beside)
        backend_options = BackendOptions(
            num_blocks=num_kv_blocks,
            block_size=block_size,
            threads=threads,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            activation_dtype=activation_dtype,
            kv_cache_dtype=kv_cache_dtype,
            pin=pin,
            device=device,
            gpu_memory_utilization=gpu_memory_utilization,
            meanwhile=loading.result,
        )
        check_load_options(backend_options, tensor_parallel_size=tensor_parallel_size, load_tokenizer=load_tokenizer)
        options = SchedulerOptions(max_num_seqs, max_num_batched_tokens, enable_prefix_caching, scheduling_policy)
        self._folder = folder
        self.default_params = SamplingParams.from_generation_config(read_json_object(folder / "generation_config.json"))
        self.backend = select_backend(backend, folder, device) if isinstance(backend, str) else backend
        if tensor_parallel_size > 1:
            from inferencex.runtime.parallel.backend import ParallelBackend  # here, for one process needs none of it

            self.backend = ParallelBackend(self.backend, tensor_parallel_size)
        executable = self.backend.compile(folder, backend_options)
        self.tokenizer = loading.result()

        from inferencex.runtime.engine.engine import Engine  # these were imported beside the backend's work
        from inferencex.runtime.engine.shared import SharedEngine
        from inferencex.runtime.structured import GrammarCompiler
        from inferencex.runtime.text.chat import ChatTemplate

        self.chat_template = (
            ChatTemplate({}, {}) if self.tokenizer is None else ChatTemplate.load(folder, self.tokenizer)
        )
        check_max_model_len(max_model_len, executable.facts, folder)
        self.engine = Engine(
            executable,
            options,
            tokenizer=self.tokenizer,
            eos_token_ids=(
                configured_eos_token_ids(folder) or () if self.tokenizer is None else self.tokenizer.eos_token_ids
            ),
            default_params=self.default_params,
            max_model_len=max_model_len,
        )
        self.shared = SharedEngine(self.engine)
        self.grammars = GrammarCompiler(
            self.tokenizer, executable.facts.vocab_size, self.tokenizer.eos_token_ids if self.tokenizer else ()
        )
        self._is_closed = False
        self._process = os.getpid()
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back the weights, the KV cache and the threads. What runs is aborted; later calls raise BackendError."""
        if not self._is_closed and os.getpid() == self._process:
            self._is_closed = True
            self.shared.close()

    @property
    def stats(self) -> EngineStats:
        """Totals since loading: tokens per second, time to first token, KV blocks used, peak and in all."""
        return self.engine.stats

    def start_profile(self) -> None:
        """Measure every operation from now on. Raises OptionError for a backend that does not."""
        self._profiled().set_profiling(True)

    def profile_lines(self) -> Iterator[str]:
        """Yield, line by line, what was measured since `start_profile`, beside what the machine does at best."""
        return self._profiled().profile_lines()

    def _profiled(self) -> ProfiledExecutable:
        executable = self.engine.executable
        if not isinstance(executable, ProfiledExecutable):
            raise OptionError(f"the backend {self.backend.name!r} does not measure its operations; use --backend cpu")
        return executable

    def require_tokenizer(self) -> Tokenizer:
        """Return the bundle's tokenizer; RequestError when it has none."""
        if self.tokenizer is None:
            raise RequestError(
                f"the bundle {self._folder} has no tokenizer ({TOKENIZER_FILE}), so it takes no text; give token ids"
            )
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        priority: int | Sequence[int] = 0,
        on_finished: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt, all of them together, and return the results in order.

        A prompt is a text or a list of token ids; without a tokenizer only token ids are taken, and the texts of the
        outputs are empty. `params`, `grammar` (what the outputs have to look like) and `priority` are for all prompts,
        or one each. `on_finished(position, output)` is called as each prompt is done. Raises RequestError before
        anything runs when one of the prompts cannot be served, and whatever error ends a request later; in that case
        the other requests of this call are aborted.
        """
        requests = self._prepare(list_prompts(prompts), params, priority, grammar, add_special_tokens=True)
        return self._collect(requests, on_finished)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        priority: int | Sequence[int] = 0,
        add_special_tokens: bool = True,
        on_finished: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[EmbeddingOutput]:
        """Return a vector for every prompt, in order: its last token's hidden state, or the mean over all of them.

        Hidden states are what the model's last linear layer reads. `normalize` gives the vectors length 1. Raises
        RequestError for models whose backend does not tell them, and otherwise what `generate` does.
        """
        self._check_usable()
        texts = list_prompts(prompts)
        requests = [
            self.engine.prepare_embedding(
                str(next(self._ids)),
                self._token_ids(prompt, add_special_tokens),
                pooling,
                normalize,
                prompt=prompt if isinstance(prompt, str) else None,
                priority=prompt_priority,
            )
            for prompt, prompt_priority in zip(texts, one_each("priority", priority, len(texts)), strict=True)
        ]
        return cast("list[EmbeddingOutput]", self._collect(requests, on_finished))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        priority: int | Sequence[int] = 0,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        on_finished: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the bundle's chat template."""
        prompts = [
            self._render(conversation, tools, add_generation_prompt, template_variables)
            for conversation in list_conversations(messages)
        ]
        return self._collect(self._prepare(prompts, params, priority, grammar, add_special_tokens=False), on_finished)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
        priority: int = 0,
    ) -> Generator[CompletionDelta, None, None]:
        """Continue one prompt and yield what each step adds; the last delta carries the whole `output`.

        Errors in the request are raised at once. Closing the iterator, or dropping it, aborts the request.
        """
        return self._deltas(self._prepare([prompt], params, priority, grammar, add_special_tokens=True)[0])

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        grammar: Grammar | None = None,
        priority: int = 0,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Generator[CompletionDelta, None, None]:
        """Answer one conversation and yield what each step adds, as `stream` does."""
        prompt = self._render(messages, tools, add_generation_prompt, template_variables)
        return self._deltas(self._prepare([prompt], params, priority, grammar, add_special_tokens=False)[0])

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> str:
        self.require_tokenizer()
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **(variables or {})
        )

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        grammar: Grammar | Sequence[Grammar | None] | None,
        add_special_tokens: bool,
    ) -> list[Request]:
        self._check_usable()
        count = len(prompts)
        each_params, priorities = one_each("params", params, count), one_each("priority", priority, count)
        grammars = one_each("grammar", grammar, count)
        requests = []
        for prompt, of_prompt, urgency, wanted in zip(prompts, each_params, priorities, grammars, strict=True):
            requests.append(
                self.engine.prepare(
                    str(next(self._ids)),
                    self._token_ids(prompt, add_special_tokens),
                    of_prompt,
                    prompt=prompt if isinstance(prompt, str) else None,
                    priority=urgency,
                    constraint=None if wanted is None else self.grammars.compile(wanted),
                )
            )
        return requests

    def _token_ids(self, prompt: Prompt, add_special_tokens: bool) -> Sequence[int]:
        return self.require_tokenizer().encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt

    def _collect(
        self, requests: list[Request], on_finished: Callable[[int, RequestOutput], None] | None
    ) -> list[RequestOutput]:
        places = {request.id: place for place, request in enumerate(requests)}
        outputs: dict[str, RequestOutput] = {}
        inbox: list[CompletionDelta] = []
        try:
            self._submit(requests, inbox)
            while len(outputs) < len(requests):
                for delta in self._next(inbox):
                    if delta.output is None:
                        continue
                    if delta.output.error is not None:
                        raise delta.output.error
                    outputs[delta.request_id] = delta.output
                    if on_finished is not None:
                        on_finished(places[delta.request_id], delta.output)
        finally:
            self._forget(requests)
        return [outputs[request.id] for request in requests]

    def _deltas(self, request: Request) -> Generator[CompletionDelta, None, None]:
        inbox: list[CompletionDelta] = []
        output = None
        try:
            self._submit([request], inbox)
            while output is None:
                for delta in self._next(inbox):
                    output = delta.output
                    if output is not None and output.error is not None:
                        raise output.error
                    yield delta
        finally:
            self._forget([request])

    def _check_usable(self) -> None:
        """Raise BackendError when closed, and in a fork: a thread that the fork does not have may hold the lock."""
        if self._is_closed:
            raise BackendError(f"the model of {self._folder} was closed; load the bundle again")
        if os.getpid() != self._process:
            raise BackendError("a loaded model does not survive a fork; load the bundle in the process that runs it")

    def _submit(self, requests: list[Request], inbox: list[CompletionDelta]) -> None:
        self._check_usable()
        self.shared.submit(requests, inbox)

    def _next(self, inbox: list[CompletionDelta]) -> list[CompletionDelta]:
        """Take what is in an inbox, running steps until there is something."""
        self._check_usable()
        while not inbox:
            if not self.shared.step_unless(inbox) and not inbox:
                raise RequestError("the request was aborted from outside while its result was awaited")
        taken = inbox.copy()
        del inbox[: len(taken)]  # others may add to it meanwhile
        return taken

    def _forget(self, requests: list[Request]) -> None:
        """Abort what has not finished, and take no more deltas of these requests; in a fork, do nothing."""
        if os.getpid() == self._process:
            self.shared.forget(request.id for request in requests)


def _import_engine() -> None:
    """Import what a backend does not need, which takes ten milliseconds: beside its work they cost nothing."""
    import inferencex.runtime.engine.shared
    import inferencex.runtime.structured
    import inferencex.runtime.text.chat  # noqa: F401


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    from inferencex.runtime.text.tokenizer import Tokenizer

    file = folder / TOKENIZER_FILE
    if not file.exists():
        return None
    make_heap_room(_HEAP_OF_TOKENIZER * file.stat().st_size)
    return Tokenizer.load(folder)
