"""The options of `inferencex-run`, and how sampling options become parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from inferencex.formats.errors import OptionError, RequestError
from inferencex.runtime.params import SamplingParams

_INPUT, _SAMPLING, _ENGINE = "What to answer", "Sampling (default: as the model's authors set it)", "Engine"


def _option(panel: str, *names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel)


Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder of the bundle.", show_default=False)]
Prompts = Annotated[
    list[str] | None,
    _option(_INPUT, "--prompt", "-p", metavar="TEXT", help="A prompt. Repeat it for several, answered together."),
]
System = Annotated[
    str | None, _option(_INPUT, "--system", metavar="TEXT", help="System prompt of every chat that has none.")
]
Raw = Annotated[
    bool,
    _option(_INPUT, "--raw", "--no-chat", help="Continue the text itself, even where there is a chat template."),
]
Input = Annotated[
    Path | None,
    _option(
        _INPUT,
        "--input",
        metavar="FILE",
        help='JSON Lines; each has "prompt", "messages" or "token_ids", and may have "id", "tools", '
        '"priority" and sampling parameters.',
    ),
]
Output = Annotated[
    Path | None,
    _option(
        _INPUT,
        "--output",
        metavar="FILE",
        help="One JSON line for each line of --input, in order. The same command continues a run that was interrupted.",
    ),
]
Stats = Annotated[bool, _option(_INPUT, "--stats/--no-stats", help="Print speeds and memory at the end.")]

MaxTokens = Annotated[int | None, _option(_SAMPLING, "--max-tokens", help="Most tokens of an answer.")]
MinTokens = Annotated[int | None, _option(_SAMPLING, "--min-tokens", help="Least tokens of an answer.")]
Temperature = Annotated[float | None, _option(_SAMPLING, "--temperature", help="0 always takes the likeliest token.")]
TopP = Annotated[float | None, _option(_SAMPLING, "--top-p", help="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int | None, _option(_SAMPLING, "--top-k", help="Keep this many of the likeliest tokens; 0: all.")]
MinP = Annotated[float | None, _option(_SAMPLING, "--min-p", help="Drop tokens this much less likely than the top.")]
Seed = Annotated[int | None, _option(_SAMPLING, "--seed", help="Makes random choices repeatable.")]
RepetitionPenalty = Annotated[float | None, _option(_SAMPLING, "--repetition-penalty", help="Above 1: repeat less.")]
PresencePenalty = Annotated[float | None, _option(_SAMPLING, "--presence-penalty", help="For tokens already used.")]
FrequencyPenalty = Annotated[float | None, _option(_SAMPLING, "--frequency-penalty", help="For each use of a token.")]
LogitBias = Annotated[
    list[str] | None, _option(_SAMPLING, "--logit-bias", metavar="ID=BIAS", help="Add to a token's logit; repeatable.")
]
Stop = Annotated[list[str] | None, _option(_SAMPLING, "--stop", metavar="TEXT", help="Ends an answer; repeatable.")]
StopTokenIds = Annotated[list[int] | None, _option(_SAMPLING, "--stop-token-id", help="Ends an answer; repeatable.")]
IncludeStop = Annotated[bool, _option(_SAMPLING, "--include-stop", help="Keep the stop text in the answer.")]
IgnoreEos = Annotated[bool, _option(_SAMPLING, "--ignore-eos", help="Go on after end-of-sequence tokens.")]
SpecialTokens = Annotated[bool, _option(_SAMPLING, "--special-tokens", help="Show special tokens in answers.")]
Count = Annotated[int | None, _option(_SAMPLING, "--n", help="Answers to each prompt.")]
Logprobs = Annotated[
    int | None, _option(_SAMPLING, "--logprobs", help="With --output: log-probabilities of this many likeliest tokens.")
]

BackendName = Annotated[str, _option(_ENGINE, "--backend", help="auto, or a backend's name.")]
Device = Annotated[
    str, _option(_ENGINE, "--device", help="auto, cpu, cuda, rocm, or a GPU by its number such as cuda:1.")
]
GpuMemoryUtilization = Annotated[
    float | None, _option(_ENGINE, "--gpu-memory-utilization", help="Share of a GPU's memory to use (default: 0.9).")
]
TensorParallelSize = Annotated[
    int, _option(_ENGINE, "--tensor-parallel-size", help="Processes that divide the model, on GPUs each with one.")
]
MaxModelLen = Annotated[int | None, _option(_ENGINE, "--max-model-len", help="Longest prompt and answer together.")]
MaxNumSeqs = Annotated[int | None, _option(_ENGINE, "--max-num-seqs", help="Most answers in progress at once.")]
MaxNumBatchedTokens = Annotated[
    int | None, _option(_ENGINE, "--max-num-batched-tokens", help="Most tokens computed in one step.")
]
KvBlocks = Annotated[int | None, _option(_ENGINE, "--kv-blocks", help="Size of the KV cache in blocks.")]
PrefixCaching = Annotated[
    bool, _option(_ENGINE, "--prefix-caching/--no-prefix-caching", help="Reuse equal beginnings of prompts.")
]
Threads = Annotated[
    int | None,
    _option(_ENGINE, "--threads", help="Threads to compute with (default: one for each physical core available)."),
]
Pin = Annotated[bool, _option(_ENGINE, "--pin/--no-pin", help="Keep each thread on a core of its own.")]
ActivationDtype = Annotated[
    Literal["auto", "int8", "float32", "bfloat16", "float16"],
    _option(
        _ENGINE,
        "--activation-dtype",
        metavar="TYPE",
        help="On a CPU (auto, int8, float32) how linears with INT4 and INT8 weights read activations; on a GPU (auto, "
        "float32, bfloat16, float16) what activations are.",
    ),
]
KvCacheDtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"],
    _option(
        _ENGINE,
        "--kv-cache-dtype",
        metavar="TYPE",
        help="How keys and values are kept: float32, float16, bfloat16, int8, fp8, or auto: as the bundle was "
        "calibrated for, if it was; fp8 needs that.",
    ),
]
Profile = Annotated[
    bool, _option(_ENGINE, "--profile", help="Print what every kind of operation took, beside the machine's limits.")
]
SchedulingPolicy = Annotated[
    Literal["fcfs", "priority"],
    _option(_ENGINE, "--scheduling-policy", metavar="POLICY", help="Which request goes first: fcfs, priority."),
]

# keyword of LLM -> the flag that sets it
_FLAGS = {
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "num_kv_blocks": "--kv-blocks",
    "threads": "--threads",
    "device": "--device",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "tensor_parallel_size": "--tensor-parallel-size",
    "activation_dtype": "--activation-dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
}

_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))


def with_parameters(params: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """Return `params` with other values, as they come from JSON or a command line.

    Raises RequestError for a name that is no sampling parameter, or a value out of range.
    """
    unknown = sorted(set(values) - _PARAMETERS)
    if unknown:
        raise RequestError(f"{unknown[0]!r} is no sampling parameter; there are {', '.join(sorted(_PARAMETERS))}")
    changes = dict(values)
    biases = changes.get("logit_bias")
    if isinstance(biases, Mapping):  # JSON has no other keys than texts
        changes["logit_bias"] = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in biases.items()}
    return replace(params, **changes)


def with_flags(message: str) -> str:
    """Return a message about the engine's options (`num_kv_blocks=0`) in terms of the flags (`--kv-blocks 0`)."""
    return re.sub(rf"\b({'|'.join(_FLAGS)})=", lambda match: f"{_FLAGS[match[1]]} ", message)


def parse_biases(entries: list[str] | None) -> dict[int, float] | None:
    """Read the values of `--logit-bias`; raises OptionError for one that is not ID=BIAS."""
    if not entries:
        return None
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError as error:
            raise OptionError(f"--logit-bias {entry!r} is not ID=BIAS, such as 50256=-100") from error
    return biases
