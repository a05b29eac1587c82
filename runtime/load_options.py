"""Which options a model can be loaded with: checks of what the caller gives, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from inferencex.formats.errors import OptionError
from inferencex.runtime.backends.base import BackendOptions, ModelFacts
from inferencex.runtime.backends.device_names import DeviceName

MAX_THREADS = 1024  # thread pools of the libraries underneath crash the process somewhere above it

_MAY_BE_NONE = ("max_model_len", "kv_cache_memory", "num_kv_blocks", "threads")


def check_load_options(options: BackendOptions, *, tensor_parallel_size: int, load_tokenizer: bool) -> None:
    """Check the types and ranges of the options of `LLM`, under the names that they have there.

    Raises OptionError for the first that no model can be loaded with, whatever is in its bundle. Limits of steps that
    are numbers, but too small for one, are found by `SchedulerOptions` as well, for those who make an engine.
    """
    if options.kv_cache_memory is not None and options.num_blocks is not None:
        raise OptionError("kv_cache_memory and num_kv_blocks both set the size of the KV cache; give one of them")
    positive: dict[str, object] = {
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_memory": options.kv_cache_memory,
        "num_kv_blocks": options.num_blocks,
        "block_size": options.block_size,
        "threads": options.threads,
        "tensor_parallel_size": tensor_parallel_size,
    }
    for name, value in positive.items():
        if value is None and name in _MAY_BE_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionError(f"{name}={value!r}; expected an integer")
        if value < 1:
            raise OptionError(f"{name}={value}; at least 1 is needed")
    if not isinstance(options.pin, bool):
        raise OptionError(f"pin={options.pin!r}; expected True or False")
    share = options.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise OptionError(f"gpu_memory_utilization={share!r}; expected a share above 0 and at most 1")
    DeviceName.parse(options.device)
    if not isinstance(load_tokenizer, bool):
        raise OptionError(f"load_tokenizer={load_tokenizer!r}; expected True or False")
    if options.threads is not None and options.threads > MAX_THREADS:
        raise OptionError(f"threads={options.threads}; at most {MAX_THREADS} are possible")


def check_max_model_len(max_model_len: int | None, facts: ModelFacts, folder: Path) -> None:
    """Check the longest sequence that is asked for against the model in `folder`. Raises OptionError."""
    if max_model_len is not None and max_model_len > facts.max_model_len:
        raise OptionError(
            f"max_model_len={max_model_len} is more than the {facts.max_model_len} positions that the "
            f"model in {folder} has; give at most that"
        )
