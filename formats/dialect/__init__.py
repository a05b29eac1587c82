"""The operators that the IR adds to ONNX: their schemas, and what they mean in numpy."""

from inferencex.formats.dialect.reference import OPERATORS, new_ops
from inferencex.formats.dialect.schemas import DOMAIN, OPSET, VERSION, register

__all__ = ["DOMAIN", "OPERATORS", "OPSET", "VERSION", "new_ops", "register"]
