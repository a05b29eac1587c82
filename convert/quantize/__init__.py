"""Quantization: what the options mean, what happens to each weight, and the methods that do it."""

from inferencex.convert.quantize.awq import Awq
from inferencex.convert.quantize.base import (
    Calibration,
    Folding,
    Method,
    QuantizedWeight,
    available_foldings,
    available_methods,
    method_named,
)
from inferencex.convert.quantize.gptq import Gptq
from inferencex.convert.quantize.plan import TensorPlan, WeightInfo, plan_quantization
from inferencex.convert.quantize.rtn import RoundToNearest, quantize_weight
from inferencex.convert.quantize.scheme import (
    QuantizationScheme,
    TensorScheme,
    available_schemes,
    parse_mixed_scheme,
    parse_scheme,
)
from inferencex.convert.quantize.smoothquant import SmoothQuant

__all__ = [
    "Awq",
    "Calibration",
    "Folding",
    "Gptq",
    "Method",
    "QuantizationScheme",
    "QuantizedWeight",
    "RoundToNearest",
    "SmoothQuant",
    "TensorPlan",
    "TensorScheme",
    "WeightInfo",
    "available_foldings",
    "available_methods",
    "available_schemes",
    "method_named",
    "parse_mixed_scheme",
    "parse_scheme",
    "plan_quantization",
    "quantize_weight",
]
