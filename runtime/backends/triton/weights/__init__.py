"""Weights as kernels read them, made on the device from what a bundle stores."""

from inferencex.runtime.backends.triton.weights.linear_weight import Format as Format
from inferencex.runtime.backends.triton.weights.linear_weight import LinearWeight as LinearWeight
from inferencex.runtime.backends.triton.weights.linear_weight import from_canonical as from_canonical
from inferencex.runtime.backends.triton.weights.linear_weight import plain as plain
