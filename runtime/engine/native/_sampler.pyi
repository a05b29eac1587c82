from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NOT_FINITE: int
UNDECIDED: int
NOTHING_ALLOWED: int

class Rule:
    def __init__(
        self,
        *,
        is_greedy: bool,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        min_tokens: int,
        stop_ids: Sequence[int],
        biases: Sequence[tuple[int, float]],
        prompt_ids: Sequence[int],
    ) -> None: ...
    def record(self, token_id: int) -> None: ...

def choose(
    logits: NDArray[np.float32],
    rows: Sequence[int],
    rules: list[Rule | None],
    uniforms: Sequence[float],
    masks: NDArray[np.int32] | None = None,
    mask_rows: Sequence[int] = (),
) -> list[int]: ...
def all_finite(logits: NDArray[np.float32], first: int, count: int) -> bool: ...
