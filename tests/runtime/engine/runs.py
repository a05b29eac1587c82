"""Prompts, and an engine that runs until all of them are answered, checked after every step."""

from __future__ import annotations

from collections.abc import Sequence

from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[7], [1, 2, 3], list(range(20)), [5, 4, 3, 2, 1] * 5, list(range(16)), list(range(17))]


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    assert engine.stats.kv_blocks_used == 0
    return outputs


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs = run(engine)
    return [list(outputs[str(index)].outputs[0].token_ids) for index in range(len(prompts))]
