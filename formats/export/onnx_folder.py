"""ONNX: a folder that onnxruntime-genai runs, and in it a plain graph over whole sequences for any ONNX runtime."""

from __future__ import annotations

from pathlib import Path

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export.checkpoint import copy_side_files, read_json, write_json
from inferencex.formats.export.decoder_facts import decoder_facts
from inferencex.formats.export.linears import listed
from inferencex.formats.export.onnx_genai import MODEL_FILE, GenaiTranslator, genai_config
from inferencex.formats.export.onnx_graph import DataFile, GraphBuilder
from inferencex.formats.export.onnx_translate import Translator

NAME = "onnx"
SEQUENCE_FILE = "full_sequence.onnx"
_DATA_FILE = "weights.data"
_CONFIG_FILE = "genai_config.json"


def write(bundle: Bundle, folder: Path) -> list[str]:
    """Write both graphs, which share their weights, and return what a user should know of them.

    A model with attention that onnxruntime-genai has no operator for gets the plain graph alone. Raises ExportError for
    what neither has a form for.
    """
    data = DataFile(folder / _DATA_FILE)
    notes: list[str] = []
    try:
        builder = GraphBuilder(data)
        plain = Translator(bundle, builder)
        plain.run()
        builder.save(folder / SEQUENCE_FILE, "full_sequence")
        widened = list(plain.weights.widened)
        try:
            widened += _write_genai(bundle, folder, data)
        except ExportError as error:
            notes.append(f"only {SEQUENCE_FILE} was written: {error}")
    finally:
        data.close()
    copy_side_files(bundle, folder)
    if widened:
        names = sorted(set(widened))
        notes.append(f"no operator reads the bundle's form of {listed(names)}: written as float32, without loss")
    return notes


def _write_genai(bundle: Bundle, folder: Path, data: DataFile) -> list[str]:
    facts = decoder_facts(bundle)
    logits = bundle.graph.outputs[0]
    width = logits.shape[-1] if logits.shape is not None else None
    generation = read_json(bundle, "generation_config.json") if "generation_config.json" in bundle.files else {}
    builder = GraphBuilder(data)
    translator = GenaiTranslator(bundle, builder, facts)
    translator.run()
    config = genai_config(bundle, facts, width if isinstance(width, int) else 0, generation)
    builder.save(folder / MODEL_FILE, "decoder")
    write_json(folder / _CONFIG_FILE, config)
    return translator.weights.widened
