"""The arrays of a step in which sequences decode, read their prompts, and want their prompt's log-probabilities."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from inferencex.runtime.engine.sampler import SequenceSampler
from inferencex.runtime.engine.scheduler import ScheduledChunk
from inferencex.runtime.engine.sequence import Request, Sequence
from inferencex.runtime.engine.step_batch import PromptRows, lay_out
from inferencex.runtime.outputs import RequestMetrics
from inferencex.runtime.params import SamplingParams


def sequence(tokens: list[int], num_prompt: int, computed: int, blocks: list[int], logprobs: bool = False) -> Sequence:
    params = SamplingParams(temperature=0.0)
    prompt = tuple(tokens[:num_prompt])
    request = Request(
        id="x",
        prompt=None,
        prompt_token_ids=prompt,
        params=params,
        max_tokens=9,
        stop_token_ids=frozenset(),
        priority=0,
        cache_root=None,
        metrics=RequestMetrics(0.0),
        prompt_logprobs=[None] * num_prompt if logprobs else None,
    )
    made = Sequence(request, 0, SequenceSampler(params, 0, prompt, ()), None, tokens, num_computed_tokens=computed)
    made.block_table.extend(blocks)
    return made


def test_decodes_and_prompts_side_by_side() -> None:
    decoding = sequence([5, 6, 7, 8, 9], 3, computed=4, blocks=[4, 2, 9])
    reading = sequence([1, 2, 3, 4, 5, 6], 6, computed=2, blocks=[7, 1, 3])
    explained = sequence([11, 12, 13], 3, computed=0, blocks=[0, 8], logprobs=True)
    chunks = [ScheduledChunk(decoding, 1), ScheduledChunk(reading, 2), ScheduledChunk(explained, 3)]
    layout = lay_out(chunks, block_size=2)
    expected = {
        "token_ids": [9, 3, 4, 11, 12, 13],
        "positions": [4, 2, 3, 0, 1, 2],
        "sequence_offsets": [0, 1, 3, 6],
        "context_lengths": [5, 4, 3],
        "block_tables": [[4, 2, 9], [7, 1, 3], [0, 8, -1]],
        "logit_rows": [0, 3, 4, 5],
        "prompt_lengths": [3, 6, 6, 3, 3, 3],
    }
    for field in fields(layout.batch):
        array = getattr(layout.batch, field.name)
        assert array.tolist() == expected[field.name], field.name
        assert array.dtype == np.int32 and array.flags.c_contiguous and array.flags.writeable
    assert layout.sampled == (decoding, explained)
    assert layout.sampled_rows == (0, 3)
    assert layout.prompt_rows == (PromptRows(explained, 1, 1, 2),)


@pytest.mark.parametrize("length", [1, 4, 5])
def test_tables_are_as_wide_as_the_longest_context(length: int) -> None:
    tokens = list(range(length))
    layout = lay_out([ScheduledChunk(sequence(tokens, 1, length - 1, list(range(10, 20))), 1)], block_size=4)
    assert layout.batch.block_tables.tolist() == [list(range(10, 10 + -(-length // 4)))]
