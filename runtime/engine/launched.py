"""Steps that choose their tokens on the device: launched, and followed by the next before their tokens are known.

While all sequences only decode, the next step is known up to its tokens, which the device takes from where the last one
put them. It is launched first and the last one's tokens are looked at then, so that the device never waits for what is
done with tokens on the host. A sequence that turns out to have ended was computed once more for nothing: its block was
not given to anyone before that step was launched, and later steps run after it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from inferencex.formats.records import record
from inferencex.runtime.backends.base import Draws, PendingTokens, SamplingExecutable, StepBatch
from inferencex.runtime.engine.scheduler import ScheduledChunk, Scheduler
from inferencex.runtime.engine.sequence import Sequence, Status
from inferencex.runtime.engine.step_batch import StepLayout, block_tables


@record(frozen=True)
class LaunchedStep:
    """A step whose tokens are to come.

    chunks:  what it computes
    sampled: the sequence that gets the token of each row
    started: when it was launched, by the engine's clock
    """

    batch: StepBatch
    chunks: SequenceOf[ScheduledChunk]
    sampled: SequenceOf[Sequence]
    tokens: PendingTokens
    started: float


def can_launch(layout: StepLayout) -> bool:
    """Tell whether the device can choose a step's tokens: nobody wants to see or change the logits."""
    return not layout.prompt_rows and all(_is_plain(sequence) for sequence in layout.sampled)


def _is_plain(sequence: Sequence) -> bool:
    return sequence.sampler.is_plain and sequence.constraint is None and sequence.request.params.logprobs is None


def launch(
    executable: SamplingExecutable, layout: StepLayout, chunks: SequenceOf[ScheduledChunk], started: float
) -> LaunchedStep:
    """Begin a step. Raises what the backend raises."""
    tokens = executable.launch(layout.batch, _draws(layout.sampled))
    return LaunchedStep(layout.batch, chunks, layout.sampled, tokens, started)


def launch_next(
    executable: SamplingExecutable, step: LaunchedStep, scheduler: Scheduler, started: float
) -> LaunchedStep | None:
    """Begin the step behind one whose tokens are not known yet; None where it takes these tokens to plan it.

    That is so while anything but decoding is to be done: a sequence waits, or reads its prompt, or has no room.
    """
    if scheduler.num_waiting or scheduler.num_running != sum(s.status is Status.RUNNING for s in step.sampled):
        return None
    rows = [row for row, sequence in enumerate(step.sampled) if _goes_on(sequence)]
    sequences = [step.sampled[row] for row in rows]
    # A step that is launched has computed all that is known; its own token, unknown, is what the next one computes.
    contexts = [len(sequence.token_ids) + 1 for sequence in sequences]
    if not rows or not all(_is_plain(s) for s in sequences) or not scheduler.reserve(sequences, contexts):
        return None
    count = len(rows)
    batch = StepBatch(
        token_ids=np.zeros(count, np.int32),
        positions=np.array(contexts, np.int32) - 1,
        sequence_offsets=np.arange(count + 1, dtype=np.int32),
        context_lengths=np.array(contexts, np.int32),
        block_tables=block_tables(sequences, -(-max(contexts) // scheduler.pool.block_size)),
        logit_rows=np.arange(count, dtype=np.int32),
        prompt_lengths=np.array([sequence.num_prompt_tokens for sequence in sequences], np.int32),
    )
    tokens = executable.launch(batch, _draws(sequences), step.tokens, np.array(rows, np.int32))
    return LaunchedStep(batch, [ScheduledChunk(sequence, 1) for sequence in sequences], sequences, tokens, started)


def _goes_on(sequence: Sequence) -> bool:
    """Tell whether a sequence takes a token behind the one that is being computed, as far as is known."""
    return sequence.status is Status.RUNNING and sequence.num_output_tokens + 1 < sequence.request.max_tokens


def _draws(sequences: SequenceOf[Sequence]) -> Draws:
    limits = [sequence.sampler.limits for sequence in sequences]
    temperature, top_k, top_p, min_p = zip(*limits, strict=True) if limits else ((), (), (), ())
    uniform = [sequence.sampler.draw_uniform() for sequence in sequences]
    return Draws(
        np.array(temperature, np.float64),
        np.array(top_k, np.int32),
        np.array(top_p, np.float64),
        np.array(min_p, np.float64),
        np.array(uniform, np.float64),
    )
