"""llama.cpp through llama-cpp-python's low-level functions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines.base import Capacity, Prompts

_FILE = "model.gguf"
_BATCH = 512


class LlamaCpp:
    """Q4_0 weights, repacked when loaded."""

    name = "llama.cpp"
    precision = "Q4_0"
    settings = "low-level API, flash attention, batches of 512 tokens, KV float16, a KV stream for each sequence"

    def version(self) -> str:
        from importlib.metadata import version

        import llama_cpp

        info = llama_cpp.llama_print_system_info().decode()
        isa = [name for name in ("AVX512_VNNI", "AVX512_BF16", "AVX2", "NEON") if f"{name} = 1" in info]
        return f"llama-cpp-python {version('llama-cpp-python')} ({', '.join(isa) or 'no vector instructions'})"

    def prepare(self, checkpoint: Path, folder: Path) -> None:
        import llama_cpp

        from bench.engines.gguf_writer import write_gguf

        whole = folder / "float16.gguf"
        write_gguf(checkpoint, whole)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        status = llama_cpp.llama_model_quantize(str(whole).encode(), str(folder / _FILE).encode(), ctypes.byref(params))
        if status != 0:
            raise RuntimeError(f"llama_model_quantize of {whole} ended with status {status}; expected 0")
        whole.unlink()

    def load(self, folder: Path, capacity: Capacity) -> _Session:
        return _Session(folder / _FILE, capacity)


class _Session:
    def __init__(self, path: Path, capacity: Capacity) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._threads = capacity.threads
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp cannot load it")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._shape = (0, 0)
        self._context: Any = None

    def generate(self, prompts: Prompts, max_tokens: int) -> Iterator[Sequence[int]]:
        self._reserve(len(prompts), max(map(len, prompts)) + max_tokens)
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        counts = [0] * len(prompts)
        newest = [0] * len(prompts)
        positions = [len(prompt) for prompt in prompts]
        # Prompts one after the other, in full batches that may hold the end of one and the beginning of the next.
        entries = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for start in range(0, len(entries), _BATCH):
            for sequence, token in self._step(entries[start : start + _BATCH]):
                newest[sequence] = token
                counts[sequence] = 1
            if any(counts):
                yield tuple(counts)
        for _ in range(max_tokens - 1):
            step = [(newest[s], positions[s], s, True) for s in range(len(prompts))]
            for sequence, token in self._step(step):
                newest[sequence] = token
                counts[sequence] += 1
                positions[sequence] += 1
            yield tuple(counts)

    def _reserve(self, sequences: int, length: int) -> None:
        """Make a context of just this shape; the warm-up before each measurement pays for it."""
        if (sequences, length) == self._shape:
            return
        api = self._api
        if self._context is not None:
            api.llama_free(self._context)
        params = api.llama_context_default_params()
        params.n_ctx = sequences * (-(-length // 256) * 256)
        params.n_seq_max = sequences
        params.n_batch = _BATCH
        params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False
        params.no_perf = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context for {sequences} sequences of {length} tokens")
        self._shape = (sequences, length)

    def _step(self, entries: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run one batch of (token, position, sequence, whether logits are wanted); return (sequence, next token)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wanted
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(entries)} tokens ended with status {status}; expected 0")
        chosen = []
        for row, (_, _, sequence, wanted) in enumerate(entries):
            if wanted:
                logits = self._api.llama_get_logits_ith(self._context, row)
                chosen.append((sequence, int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())))
        return chosen


ENGINE = LlamaCpp()
