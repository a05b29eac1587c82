"""How a model is loaded: what `LLM` takes, and how many times."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from inferencex.formats.errors import OptionError
from inferencex.runtime.engine.scheduler_options import Policy

if TYPE_CHECKING:
    from inferencex.runtime.server.config.settings import Settings

MAX_REPLICAS = 64


@dataclass(frozen=True)
class ModelOptions:
    """Options of one version of a model. Raises OptionError for a number of replicas that makes no sense.

    replicas:  engines that serve the version, each with weights and KV cache of its own; on the CPU they share
               nothing but file mappings, and `threads` counts for each
    warm_up:   run a short prompt before the version is called ready

    The rest is passed to `LLM`, which says what it means.
    """

    replicas: int = 1
    warm_up: bool = True
    backend: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    scheduling_policy: Policy = "fcfs"
    threads: int | None = None
    pin: bool = False
    activation_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int):
            raise OptionError(f"replicas={self.replicas!r}; expected an integer")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise OptionError(f"replicas={self.replicas}; expected 1 to {MAX_REPLICAS}")

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return what the server's settings say of every model."""
        engine = settings.engine.model_dump(include={field.name for field in fields(cls)})
        model = settings.model.model_dump(include={"replicas", "warm_up", "max_model_len"})
        return cls(**engine, **model)

    def llm_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `LLM`."""
        own = ("replicas", "warm_up")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}
