"""The tools that are compared, one file each behind one contract."""

from __future__ import annotations

from importlib import import_module

from bench.accuracy.tools.base import Tool

OURS = "inferencex"
_MODULES = {
    OURS: "ours",
    "llm-compressor": "llm_compressor",
    "gptqmodel": "gptqmodel",
    "autoround": "autoround",
    "nncf": "nncf_openvino",
    "llama.cpp": "llama_cpp",
}
NAMES = tuple(_MODULES)


def find_tool(name: str) -> Tool:
    """Return the tool of that name; KeyError when there is none. Imports nothing of the tool's own package."""
    tool: Tool = import_module(f"bench.accuracy.tools.{_MODULES[name]}").TOOL
    return tool
