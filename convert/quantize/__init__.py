"""Quantization: what the options mean, what happens to each weight, and the methods that do it."""

from inferencex.convert.quantize.base import Calibration, Method, QuantizedWeight, available_methods, method_named
from inferencex.convert.quantize.plan import TensorPlan, WeightInfo, plan_quantization
from inferencex.convert.quantize.rtn import RoundToNearest, quantize_weight
from inferencex.convert.quantize.scheme import QuantizationScheme, TensorScheme, available_schemes, parse_scheme

__all__ = [
    "Calibration",
    "Method",
    "QuantizationScheme",
    "QuantizedWeight",
    "RoundToNearest",
    "TensorPlan",
    "TensorScheme",
    "WeightInfo",
    "available_methods",
    "available_schemes",
    "method_named",
    "parse_scheme",
    "plan_quantization",
    "quantize_weight",
]
