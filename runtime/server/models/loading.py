"""Loading all replicas of a bundle, on whatever thread is given: memory first, then weights, then a short prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from inferencex.formats.errors import BackendError, BundleError
from inferencex.runtime.llm import LLM
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.server.models.available_memory import available_memory
from inferencex.runtime.server.models.memory_plan import MemoryPlan, fit, plan_memory
from inferencex.runtime.server.models.options import ModelOptions

_LOG = logging.getLogger(__name__)

Phase = Literal["loading", "warming"]
ReportProgress = Callable[[Phase, float], None]

_WARM_UP_PROMPT = 64  # tokens: more than the kernels for few rows take
_WARM_UP_OUTPUT = 2


@dataclass(frozen=True)
class LoadedReplicas:
    """What a loader returns: replicas, the options they were loaded with, and the memory they should take."""

    llms: Sequence[LLM]
    options: ModelOptions
    memory: MemoryPlan | None


class Loader(Protocol):
    """Loads a bundle; called on a thread of its own."""

    def __call__(self, path: Path, options: ModelOptions, progress: ReportProgress) -> LoadedReplicas:
        """Return the replicas, loaded and warm; raises InferenceXError."""
        ...


def load_replicas(path: Path, options: ModelOptions, progress: ReportProgress) -> LoadedReplicas:
    """Load a bundle `options.replicas` times, and run a short prompt on each.

    Raises BackendError when the memory does not suffice, and whatever `LLM` raises; nothing stays loaded then.
    """
    if not path.is_dir():
        raise BundleError(f"{path}: is not a folder; a bundle is the folder that inferencex-convert writes")
    memory, fitting = fit(str(path), plan_memory(path, options), options, available_memory())
    llms: list[LLM] = []
    for index in range(fitting.replicas):
        progress("loading", index / fitting.replicas)
        llm = LLM(path, **fitting.llm_arguments())
        if fitting.warm_up:
            progress("warming", index / fitting.replicas)
            warm_up(llm)
            if index == 0:
                _prepare_grammars(llm)
        llms.append(llm)
    return LoadedReplicas(llms, fitting, memory)


def warm_up(llm: LLM) -> None:
    """Run a short prompt, so that the first request does not wait for pages to be mapped and threads to start."""
    limits = llm.engine.limits
    room = min(limits.max_model_len, limits.num_slots)
    num_output = max(min(_WARM_UP_OUTPUT, room - 1), 1)
    num_prompt = max(min(_WARM_UP_PROMPT, room - num_output), 1)
    prompt = [position % limits.vocab_size for position in range(num_prompt)]
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True))


def _prepare_grammars(llm: LLM) -> None:
    """Read the tokenizer into the form that grammars need: a second that the first of them would wait for."""
    if llm.tokenizer is None:
        return
    try:
        llm.grammars.load()
    except BackendError as error:  # all but structured output can be served
        _LOG.warning("%s", error)
