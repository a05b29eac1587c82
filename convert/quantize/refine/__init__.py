"""Refinement: changes the numbers of quantized weights, never their format, and never for the worse."""

from inferencex.convert.quantize.refine.blockwise import BLOCK_SCHEDULE, Block, BlockSamples, refine_block
from inferencex.convert.quantize.refine.descent import Progress, Refined, Schedule
from inferencex.convert.quantize.refine.end_to_end import (
    MODEL_SCHEDULE,
    Model,
    Windows,
    end_to_end_bytes,
    refine_end_to_end,
)
from inferencex.convert.quantize.refine.parameters import Refinable, Snapshot
from inferencex.convert.quantize.refine.rounding import LearnableWeight, Rates

__all__ = [
    "BLOCK_SCHEDULE",
    "MODEL_SCHEDULE",
    "Block",
    "BlockSamples",
    "LearnableWeight",
    "Model",
    "Progress",
    "Rates",
    "Refinable",
    "Refined",
    "Schedule",
    "Snapshot",
    "Windows",
    "end_to_end_bytes",
    "refine_block",
    "refine_end_to_end",
]
