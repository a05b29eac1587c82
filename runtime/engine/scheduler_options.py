"""Limits of a step, which whoever loads a model can check before anything is loaded."""

from __future__ import annotations

from typing import Literal

from inferencex.formats.errors import OptionError
from inferencex.formats.records import record

Policy = Literal["fcfs", "priority"]


@record(frozen=True)
class SchedulerOptions:
    """Limits of a step. Raises OptionError for values that allow no step.

    policy: "fcfs" goes by arrival; "priority" by the request's priority first, lower values being more urgent
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    enable_prefix_caching: bool = True
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}; at least 1 is needed")
        if self.policy not in ("fcfs", "priority"):
            raise OptionError(f"scheduling_policy={self.policy!r}; expected 'fcfs' or 'priority'")
