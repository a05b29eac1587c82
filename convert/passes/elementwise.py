"""The ONNX operators that compute every element of their output alone."""

from __future__ import annotations

ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "Cast", "CastLike", "Ceil", "Clip", "Cos", "Div",
    "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity",
    "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or",
    "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Sum",
    "Tanh", "Where", "Xor",
})  # fmt: skip
