"""For every operator that can compute a part of its result: what it needs for that of its inputs."""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.runtime.parallel.rules import arrangement, attention, elementwise, products, quantization
from inferencex.runtime.parallel.rules.contract import Facts as Facts
from inferencex.runtime.parallel.rules.contract import IndivisibleError as IndivisibleError
from inferencex.runtime.parallel.rules.contract import Needs as Needs
from inferencex.runtime.parallel.rules.contract import Rule

RULES: Mapping[tuple[str, str], Rule] = {
    **elementwise.RULES,
    **arrangement.RULES,
    **products.RULES,
    **attention.RULES,
    **quantization.RULES,
}
