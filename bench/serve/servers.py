"""The servers that are compared: how each is started, and what it must be asked to do the same work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from bench.engines import OURS
from bench.serve.load import Load
from inferencex.runtime.load_test.api import RequestShape

_MODEL = "model"  # the name that every server has it under
_GIBIBYTES = 1  # for vLLM's keys and values: what it counts in, and enough for the load


class Server(Protocol):
    """A server of one of the engines of `bench.engines`, which prepare its model.

    module:   of the server, whose import shows whether it is installed
    as_text:  whether prompts are sent as text, for it takes no token ids
    settings: how it is configured, one sentence
    """

    engine: str
    module: str
    as_text: bool
    settings: str

    def command(self, folder: Path, port: int, load: Load) -> list[str]:
        """Return the arguments of its interpreter."""
        ...

    def environment(self, load: Load) -> Mapping[str, str]:
        """Return the variables it needs."""
        ...

    def shape(self, load: Load, stream: bool) -> RequestShape:
        """Return what requests look like."""
        ...


class InferenceX:
    """Our own."""

    engine = OURS
    module = "inferencex.runtime.server.cli"
    as_text = False
    settings = "`inferencex serve` with defaults, prompts as token ids"

    def command(self, folder: Path, port: int, load: Load) -> list[str]:
        """Return the arguments of its interpreter."""
        options = {
            "--model-path": folder,
            "--served-model-name": _MODEL,
            "--host": "127.0.0.1",
            "--port": port,
            "--max-model-len": load.longest,
            "--max-num-seqs": load.concurrency,
            "--threads": load.threads,
        }
        return ["-c", "from inferencex.cli.main import main; main()", "serve", *_flat(options)]

    def environment(self, load: Load) -> Mapping[str, str]:
        """Return the variables it needs."""
        return {}

    def shape(self, load: Load, stream: bool) -> RequestShape:
        """Return what requests look like."""
        return RequestShape(_MODEL, stream=stream, ignore_eos=True)


class LlamaCpp:
    """`llama-cpp-python[server]`, which answers one request after the other."""

    engine = "llama.cpp"
    module = "llama_cpp.server.app"
    as_text = True
    settings = (
        "`llama_cpp.server`, flash attention, logits of the last token alone, streams not interrupted by the next "
        "request, prompts as text (it takes no token ids); it answers one request after the other"
    )

    def command(self, folder: Path, port: int, load: Load) -> list[str]:
        """Return the arguments of its interpreter."""
        options = {
            "--model": folder / "model.gguf",
            "--model_alias": _MODEL,
            "--host": "127.0.0.1",
            "--port": port,
            "--n_ctx": load.longest,
            "--n_threads": load.threads,
            "--n_threads_batch": load.threads,
            "--flash_attn": "true",
            "--logits_all": "false",
            "--interrupt_requests": "false",
            "--verbose": "false",
        }
        return ["-m", "llama_cpp.server", *_flat(options)]

    def environment(self, load: Load) -> Mapping[str, str]:
        """Return the variables it needs."""
        return {}

    def shape(self, load: Load, stream: bool) -> RequestShape:
        """Return what requests look like: no penalties, and no end before the full length."""
        return RequestShape(_MODEL, stream=stream, extra={"repeat_penalty": 1.0, "min_tokens": load.output_tokens})


class Vllm:
    """vLLM's CPU build."""

    engine = "vllm"
    module = "vllm.entrypoints.openai.api_server"  # its command asks for metadata that the CPU build has not
    as_text = False
    settings = "its OpenAI server, bfloat16, threads bound to cores, prompts as token ids"

    def command(self, folder: Path, port: int, load: Load) -> list[str]:
        """Return the arguments of its interpreter."""
        options = {
            "--model": folder,
            "--served-model-name": _MODEL,
            "--host": "127.0.0.1",
            "--port": port,
            "--max-model-len": load.longest,
            "--max-num-seqs": load.concurrency,
            "--dtype": "bfloat16",
        }
        return ["-m", self.module, *_flat(options)]

    def environment(self, load: Load) -> Mapping[str, str]:
        """Return the variables it needs."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(load.threads)]
        return {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: load.threads])),
            "VLLM_CPU_KVCACHE_SPACE": str(_GIBIBYTES),
            "VLLM_LOGGING_LEVEL": "WARNING",
        }

    def shape(self, load: Load, stream: bool) -> RequestShape:
        """Return what requests look like."""
        return RequestShape(_MODEL, stream=stream, ignore_eos=True)


def _flat(options: Mapping[str, object]) -> list[str]:
    return [part for name, value in options.items() for part in (name, str(value))]


SERVERS: Mapping[str, Server] = {server.engine: server for server in (InferenceX(), LlamaCpp(), Vllm())}
