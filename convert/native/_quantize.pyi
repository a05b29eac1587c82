from typing import Any

import numpy as np
from numpy.typing import NDArray

class Scan:
    @property
    def smallest_scale(self) -> float: ...
    @property
    def largest_scale(self) -> float: ...
    @property
    def first_bad(self) -> int: ...

def scan(
    weights: NDArray[Any],
    element: str,
    group_size: int,
    bits: int,
    symmetric: bool,
    threads: int,
    instruction_set: str = "",
) -> Scan: ...
def quantize(
    weights: NDArray[Any],
    element: str,
    group_size: int,
    bits: int,
    symmetric: bool,
    half_scales: bool,
    search: bool,
    importance: NDArray[np.float32],
    values: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8],
    errors: NDArray[np.float64],
    norms: NDArray[np.float64],
    threads: int,
    instruction_set: str = "",
) -> None: ...
def quantize_to_floats(
    weights: NDArray[Any],
    element: str,
    group_size: int,
    number: str,
    scale_kind: str,
    tensor_scale: float,
    search: bool,
    importance: NDArray[np.float32],
    values: NDArray[np.uint8],
    scales: NDArray[np.float32],
    errors: NDArray[np.float64],
    norms: NDArray[np.float64],
    threads: int,
    instruction_set: str = "",
) -> None: ...
def instruction_sets() -> list[str]: ...
