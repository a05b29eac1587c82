"""Structured output: JSON, JSON schemas, regular expressions, grammars and choices as constraints on tokens."""

from inferencex.runtime.structured.compiler import GrammarCompiler
from inferencex.runtime.structured.grammar import Grammar, embedded_json

__all__ = ["Grammar", "GrammarCompiler", "embedded_json"]
