"""What a bundle will take of this machine's memory, checked before any of it is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import BackendOptions, MemoryPlanner
from inferencex.runtime.server.models.available_memory import AvailableMemory
from inferencex.runtime.server.models.options import ModelOptions

_RESERVED = 20  # one part in so many of the available memory is left to requests, buffers and the interpreter


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of all replicas together.

    weights:   as stored; each replica keeps them once, rearranged
    kv_cache:  the pools of keys and values, whose pages are taken as they are first written to; 0 where a backend
               does not say
    step:      values of one step
    smallest_kv_cache: enough for one sequence of the full length in each replica
    device:    memory of the GPU that all this is taken of; None for the process's own
    """

    replicas: int
    weights: int
    kv_cache: int
    step: int
    smallest_kv_cache: int = 0
    device: AvailableMemory | None = None

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.step

    def describe(self) -> str:
        """Return the numbers as a line for logs and errors."""
        times = "" if self.replicas == 1 else f" ({self.replicas} replicas)"
        return (
            f"{megabytes(self.total)}{times}: weights {megabytes(self.weights)}, "
            f"KV cache {megabytes(self.kv_cache)}, values of a step {megabytes(self.step)}"
        )


def plan_memory(path: Path, options: ModelOptions) -> MemoryPlan:
    """Estimate what loading a bundle takes. Raises what opening it and its backend raise."""
    backend = select_backend(options.backend, path, options.device)
    if options.tensor_parallel_size > 1:
        from inferencex.runtime.parallel.backend import ParallelBackend

        backend = ParallelBackend(backend, options.tensor_parallel_size)
    replicas = options.replicas
    if not isinstance(backend, MemoryPlanner):
        weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return MemoryPlan(replicas, weights * replicas, (options.kv_cache_memory or 0) * replicas, 0)
    needs = backend.memory_needs(path, _backend_options(options))
    return MemoryPlan(
        replicas,
        needs.weights * replicas,
        needs.state * replicas,
        needs.step * replicas,
        needs.state_of_longest * replicas,
        None if needs.device is None else AvailableMemory(needs.device.free, needs.device.total, needs.device.name),
    )


def fit(name: str, plan: MemoryPlan, options: ModelOptions, memory: AvailableMemory) -> tuple[MemoryPlan, ModelOptions]:
    """Return the plan and options to load with, such that they fit the available memory.

    A KV cache whose size nobody asked for is made smaller where it has to be, down to one sequence of the full length.
    Raises BackendError, with the numbers and what to lower, when that is not enough.
    """
    if plan.device is not None:
        memory = plan.device
    room = memory.available - memory.available // _RESERVED
    if plan.total <= room:
        return plan, options
    left = room - plan.weights - plan.step
    chosen = options.kv_cache_memory is not None or options.num_kv_blocks is not None
    if not chosen and 0 < plan.smallest_kv_cache <= left:
        asked = left // options.replicas * _ranks_of_one_number(plan, options)
        return replace(plan, kv_cache=left), replace(options, kv_cache_memory=asked)
    raise BackendError(
        f"{name} takes {plan.describe()}; {megabytes(memory.available)} of {megabytes(memory.total)} are available "
        f"({memory.limit}), of which {megabytes(room)} may be used; {_what_to_lower(plan, options, left)}"
    )


def megabytes(nbytes: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB"


def _ranks_of_one_number(plan: MemoryPlan, options: ModelOptions) -> int:
    """Return how many ranks share a `kv_cache_memory` of which the plan counts one rank's: those with a device each."""
    return 1 if plan.device is None else options.tensor_parallel_size


def _what_to_lower(plan: MemoryPlan, options: ModelOptions, left: int) -> str:
    ways = []
    if left > 0 and plan.kv_cache > 0:
        most = left // plan.replicas * _ranks_of_one_number(plan, options)
        ways.append(f"give a kv_cache_memory of at most {most} bytes")
    if plan.smallest_kv_cache > left:
        ways.append("lower max_model_len")
    if plan.step > plan.total // 4:
        ways.append(f"lower max_num_batched_tokens ({options.max_num_batched_tokens})")
    if options.replicas > 1:
        ways.append(f"ask for fewer replicas than {options.replicas}")
    ways.append("unload another model")
    return ", or ".join(ways)


def _backend_options(options: ModelOptions) -> BackendOptions:
    return BackendOptions(
        num_blocks=options.num_kv_blocks,
        block_size=options.block_size,
        threads=options.threads,
        kv_cache_memory=options.kv_cache_memory,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        activation_dtype=options.activation_dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        pin=options.pin,
        device=options.device,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )
