import numpy as np
from numpy.typing import NDArray

def factorize(
    gram: NDArray[np.float32],
    order: NDArray[np.int64],
    ridge: float,
    tolerance: float,
    factor: NDArray[np.float32],
    threads: int,
    instruction_set: str = "",
) -> bool: ...
def round(
    weights: NDArray[np.float32],
    factor: NDArray[np.float32],
    order: NDArray[np.int64],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.float32],
    group_size: int,
    lowest: float,
    highest: float,
    integers: NDArray[np.float32],
    errors: NDArray[np.float64],
    threads: int,
    instruction_set: str = "",
) -> None: ...
def descend(
    weights: NDArray[np.float32],
    gram: NDArray[np.float32],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.float32],
    group_size: int,
    lowest: float,
    highest: float,
    ridge: float,
    sweeps: int,
    half_scales: bool,
    smallest_scale: float,
    largest_scale: float,
    integers: NDArray[np.float32],
    errors: NDArray[np.float64],
    threads: int,
    instruction_set: str = "",
) -> None: ...
def quadratic(
    errors: NDArray[np.float32],
    gram: NDArray[np.float32],
    result: NDArray[np.float64],
    threads: int,
    instruction_set: str = "",
) -> None: ...
def instruction_sets() -> list[str]: ...
