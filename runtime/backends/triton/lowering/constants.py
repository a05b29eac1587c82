"""The static values of a graph on the device: tensors, linear weights, tables of embeddings."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from inferencex.formats.graph import Value
from inferencex.runtime.backends.graph.static_values import StaticValues, StoredArray, StoredWeight
from inferencex.runtime.backends.triton.lowering.scale_codes import scale_codes
from inferencex.runtime.backends.triton.weights import LinearWeight, from_canonical, plain
from inferencex.runtime.backends.triton.weights.linear_weight import Layout

_TORCH_TYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8e4m3": torch.float8_e4m3fn,
    "i64": torch.int64, "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
_NUMBER_BITS = {"int3": 3, "int4": 4, "int5": 5, "int6": 6, "int8": 8, "f8e4m3": 8, "f4e2m1": 4}
_NUMBERS = {"f8e4m3": "e4m3", "f4e2m1": "e2m1"}


def stored_tensor(stored: StoredArray, device: torch.device) -> Tensor:
    """Return stored elements on the device, as they are."""
    array = np.ascontiguousarray(stored.array)
    with warnings.catch_warnings():  # files are mapped read-only, and torch has no such tensors; nothing writes here
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array)
    return tensor.to(device).view(_TORCH_TYPES[stored.dtype])


class Constants:
    """Puts static values on a device, each once, in the forms in which instructions read them."""

    def __init__(self, static: StaticValues, device: torch.device, dtype: torch.dtype) -> None:
        self.static, self.device, self.dtype = static, device, dtype
        self._host: dict[str, Tensor] = {}
        self._on_device: dict[str, Tensor] = {}
        self._plain: dict[int, tuple[StoredArray, Tensor]] = {}
        self._linears: dict[tuple[str, str | None, Layout], LinearWeight] = {}

    def __contains__(self, value: Value | None) -> bool:
        return value in self.static

    def on_host(self, value: Value) -> Tensor:
        """Return a static value on the host; floats of any width become float32."""
        if value.name not in self._host:
            self._host[value.name] = self._evaluated(value)
        return self._host[value.name]

    def on_device(self, value: Value) -> Tensor:
        """Return a static value on the device; floats of any width become float32."""
        if value.name not in self._on_device:
            self._on_device[value.name] = self.on_host(value).to(self.device)
        return self._on_device[value.name]

    def float_vector(self, value: Value | None) -> Tensor | None:
        """Return a static value flat, as float32 on the device: scales of norms, biases, sinks."""
        return None if value is None else self.on_device(value).to(torch.float32).reshape(-1).contiguous()

    def table(self, value: Value, rows: int) -> Tensor:
        """Return the first `rows` rows of a table, float32 `[rows, width]`, computing no others where it can."""
        array = self.static.rows(value, rows)
        table = self.on_device(value) if array is None else torch.from_numpy(array).to(self.device)
        return table[:rows].to(torch.float32).contiguous()

    def linear(self, value: Value, bias: Value | None, layout: Layout = "panels") -> LinearWeight:
        """Return a static matrix, or stack of matrices, as linears read it; what no kernel reads becomes floats."""
        key = (value.name, None if bias is None else bias.name, layout)
        if key not in self._linears:
            self._linears[key] = self._linear(value, bias, layout)
        return self._linears[key]

    def forget(self, value: Value) -> None:
        """Let go of a linear's weight on the device, and of all weights of floats, which others may read as well."""
        for key in [key for key in self._linears if key[0] == value.name]:
            del self._linears[key]
        self._plain.clear()

    def plain_weight(self, stored: StoredWeight) -> Tensor:
        """Return a weight of floats in the compute type; one that several read, such as tied embeddings, once."""
        identity = id(stored.values)
        if identity not in self._plain:
            tensor = stored_tensor(stored.values, self.device).to(self.dtype)
            self._plain[identity] = (stored.values, tensor)
        return self._plain[identity][1]

    def _linear(self, value: Value, bias: Value | None, layout: Layout) -> LinearWeight:
        stored = self.static.weight(value)
        bias_tensor = None
        if bias is not None:
            size = value.shape[:-1] if value.shape is not None else ()
            bias_tensor = self.on_device(bias).to(torch.float32)
            if len(size) == 1:
                bias_tensor = bias_tensor.reshape(-1).expand(int(size[0] or 0)).contiguous()
        if stored is None:
            return plain(self.on_device(value).to(torch.float32), self.dtype, bias_tensor)
        if stored.scales is None:
            return plain(self.plain_weight(stored), self.dtype, bias_tensor)
        zero_points = stored.zero_points
        codes = scale_codes(self.static, value) if stored.format == "f4e2m1" else None
        return from_canonical(
            stored_tensor(stored.values, self.device).reshape(-1)
            if _NUMBER_BITS[stored.format] < 8
            else stored_tensor(stored.values, self.device).reshape(stored.shape),
            stored_tensor(stored.scales, self.device) if codes is None else codes.codes.to(self.device),
            None if zero_points is None else stored_tensor(zero_points, self.device),
            shape=stored.shape,
            bits=_NUMBER_BITS[stored.format],
            number=_NUMBERS.get(stored.format, "int"),  # type: ignore[arg-type]
            signed=stored.is_signed,
            group_size=stored.group,
            tensor_scale=1.0 if codes is None else codes.tensor_scale,
            bias=bias_tensor,
            layout=layout,
        )

    def _evaluated(self, value: Value) -> Tensor:
        array = np.asarray(self.static.array(value))
        if array.dtype.kind in "biu" or array.dtype in (np.float32, np.float64):
            return torch.from_numpy(np.array(array, dtype=np.float32 if array.dtype == np.float64 else array.dtype))
        return torch.from_numpy(array.astype(np.float32))
