"""The command itself: which of its modes is meant, and what goes wrong before a model is loaded."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from inferencex.cli.console import DebugOption, run_app, stderr_console
from inferencex.cli.plain_values import PromptCommand
from inferencex.formats.errors import BundleError, OptionError, RequestError
from inferencex.runtime.blas_threads import idle_blas_threads_sleep
from inferencex.runtime.cli import options
from inferencex.runtime.cli.answer import answer_prompts
from inferencex.runtime.cli.requests import RunRequest
from inferencex.runtime.garbage import collection_paused
from inferencex.runtime.params import SamplingParams

if TYPE_CHECKING:
    from inferencex.runtime.cli.batch import BatchJob
    from inferencex.runtime.llm import LLM

FAILED_LINES = 1  # exit status of a batch in which some lines could not be answered

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    cls=PromptCommand, epilog="Without --prompt and --input: a chat on a terminal, else standard input is the prompt."
)
def run(
    bundle: options.Bundle,
    prompt: options.Prompts = None,
    system: options.System = None,
    raw: options.Raw = False,
    input: options.Input = None,
    output: options.Output = None,
    stats: options.Stats = True,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenIds = None,
    include_stop: options.IncludeStop = False,
    ignore_eos: options.IgnoreEos = False,
    special_tokens: options.SpecialTokens = False,
    n: options.Count = None,
    logprobs: options.Logprobs = None,
    backend: options.BackendName = "auto",
    device: options.Device = "auto",
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_blocks: options.KvBlocks = None,
    prefix_caching: options.PrefixCaching = True,
    threads: options.Threads = None,
    pin: options.Pin = False,
    activation_dtype: options.ActivationDtype = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    profile: options.Profile = False,
    scheduling_policy: options.SchedulingPolicy = "fcfs",
    debug: DebugOption = False,
) -> None:
    """Answer prompts, chat, or work through a file of requests with a bundle.

    Only answers go to standard output. With --input every line is checked before the model is loaded; a
    malformed one stops the run, naming its number. A line that turns out to be unanswerable (too long, say)
    gets a record with "error", and the exit status is 1.
    """
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": options.parse_biases(logit_bias),
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "include_stop_str_in_output": include_stop,
        "ignore_eos": ignore_eos,
        "skip_special_tokens": not special_tokens,
        "n": n,
        "logprobs": logprobs,
    }
    params = SamplingParams(**{name: value for name, value in sampling.items() if value is not None})
    engine: dict[str, Any] = {
        "backend": backend,
        "device": device,
        "gpu_memory_utilization": gpu_memory_utilization,
        "tensor_parallel_size": tensor_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_kv_blocks": kv_blocks,
        "enable_prefix_caching": prefix_caching,
        "threads": threads,
        "pin": pin,
        "activation_dtype": activation_dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "scheduling_policy": scheduling_policy,
    }
    engine = {name: value for name, value in engine.items() if value is not None}
    _check_modes(bundle, prompt, system, raw, input, output, params)
    if input is not None and output is not None:
        from inferencex.runtime.cli.batch import BatchJob  # a mode's own parts are imported when it is chosen

        _batch(engine, BatchJob(bundle, input, output, params, raw, system, max_model_len), stats, profile)
        return
    interactive = prompt is None and sys.stdin.isatty()
    prompts = prompt if prompt is not None else [] if interactive else [_standard_input()]
    llm = _load(bundle, engine, profile)
    llm.require_tokenizer()
    _check_system(llm, system)
    if interactive:
        from inferencex.runtime.cli.chat import Chat

        Chat(llm, params, raw, system, stderr_console()).run()
    else:
        answer_prompts(llm, [RunRequest(params, prompt=text) for text in prompts], raw, system)
    _finish(llm, stats, profile)


def load(bundle: Path, engine: dict[str, Any]) -> LLM:
    """Load a bundle; imported here, so that help and wrong usage come at once."""
    from inferencex.runtime.llm import LLM

    return LLM(bundle, **engine)


def _load(bundle: Path, engine: dict[str, Any], profile: bool) -> LLM:
    """Load a bundle; what is wrong with an option is said of the flag that set it."""
    try:
        with idle_blas_threads_sleep(), collection_paused():  # also while modules are imported
            llm = load(bundle, engine)
        gc.freeze()
        if profile:
            llm.start_profile()
        return llm
    except OptionError as error:
        raise OptionError(options.with_flags(str(error))) from error


def main() -> None:
    """Entry point of `inferencex-run`."""
    run_app(app, "inferencex-run")


def _check_modes(
    bundle: Path,
    prompt: list[str] | None,
    system: str | None,
    raw: bool,
    input: Path | None,
    output: Path | None,
    params: SamplingParams,
) -> None:
    """Refuse options that contradict each other, and a bundle that is not there."""
    if not bundle.is_dir():
        raise BundleError(f"{bundle}: is not a folder; give the folder of a bundle, as inferencex-convert writes it")
    if (input is None) != (output is None):
        raise OptionError("--input and --output go together; give both, or neither")
    if input is not None and prompt is not None:
        raise OptionError("--prompt and --input are two sources of prompts; give one of them")
    if input is not None and output is not None and output.exists() and input.exists() and output.samefile(input):
        raise OptionError(f"--input and --output are both {input}; write the answers to another file")
    if raw and system is not None:
        raise OptionError("--system is part of a chat, and --raw asks for none; leave one of them out")
    if params.logprobs is not None and output is None:
        raise OptionError("--logprobs needs --input and --output; the terminal shows only text")


def _batch(engine: dict[str, Any], job: BatchJob, stats: bool, profile: bool) -> None:
    from inferencex.runtime.cli.batch import run_batch
    from inferencex.runtime.cli.batch_files import OutputFile, read_input
    from inferencex.runtime.cli.progress import BatchProgress

    total = job.check()
    circumstances = job.circumstances
    console = stderr_console()
    with OutputFile(job.output) as output:
        lines = read_input(job.input)
        done = output.resume(lines, circumstances)
        if done:
            console.print(f"{done} of {total} lines were answered by an earlier run")
        if done == total:
            return
        llm = _load(job.bundle, engine, profile)
        _check_system(llm, job.system)
        with BatchProgress(console, total, done) as progress:
            try:
                failed = run_batch(llm, job, lines, done, output, progress)
            except KeyboardInterrupt as interrupt:
                raise KeyboardInterrupt(
                    f"{progress.done} of {total} lines are answered; the same command goes on with the rest"
                ) from interrupt
        _finish(llm, stats, profile)
    if failed:
        console.print(f"{failed} of {total} lines could not be answered; their records say why")
        raise typer.Exit(FAILED_LINES)


def _check_system(llm: LLM, system: str | None) -> None:
    """Refuse a system prompt that the model has no place for."""
    if system is not None and not llm.chat_template:
        raise OptionError("--system is part of a chat, and this bundle has no chat template; leave it out")


def _standard_input() -> str:
    """Return all of standard input, without the line break at its end."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text ({error})") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise RequestError("standard input is empty; pipe a prompt into it, or give --prompt")
    return text


def _finish(llm: LLM, stats: bool, profile: bool) -> None:
    if profile:
        for line in llm.profile_lines():
            stderr_console().print(line, markup=False, highlight=False, soft_wrap=True)
    if stats:
        from inferencex.runtime.cli.statistics import describe

        stderr_console().print(describe(llm.stats), style="dim", markup=False)
