"""Record a transformers model as an ONNX graph, without memory for its weights."""

from inferencex.convert.capture.export import Captured, capture

__all__ = ["Captured", "capture"]
