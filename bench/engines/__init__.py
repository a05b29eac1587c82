"""The engines that are compared, one file each behind one contract."""

from __future__ import annotations

from importlib import import_module

from bench.engines.base import Engine

OURS = "inferencex"
_MODULES = {
    OURS: "ours",
    "openvino": "openvino",
    "llama.cpp": "llama_cpp",
    "onnxruntime-genai": "onnxruntime_genai",
    "vllm": "vllm",
}
NAMES = tuple(_MODULES)


def find_engine(name: str) -> Engine:
    """Return the engine of that name; KeyError when there is none. Imports nothing of the engine's own package."""
    engine: Engine = import_module(f"bench.engines.{_MODULES[name]}").ENGINE
    return engine
