"""Quantize the linears that read one input, from what they read in the calibration samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.calibrate.factors import scaled
from inferencex.convert.calibrate.routing import Routing
from inferencex.convert.calibrate.sharing import SharedInput
from inferencex.convert.calibrate.stacking import stack
from inferencex.convert.calibrate.statistics import input_statistics
from inferencex.convert.calibrate.streams import Streams
from inferencex.convert.calibrate.work_dir import FinishedBlock
from inferencex.convert.layer_report import LayerReport
from inferencex.convert.quantize import TensorPlan, TensorScheme, method_named
from inferencex.convert.quantize.base import Calibration, Method, QuantizedWeight
from inferencex.convert.quantize.composition import Composition

_EXPERTS_THAT_CHOOSE = 4  # experts whose weights take part in the choice of factors that all share


@dataclass(frozen=True)
class LayerQuantizer:
    """Quantizes weights as planned with the methods of a composition, and reports how far each is from its source."""

    plans: Mapping[str, TensorPlan]
    composition: Composition
    routing: Routing
    streams: Streams
    pool: Executor
    threads: int

    def quantize(self, shared: SharedInput, originals: Mapping[str, Tensor], finished: FinishedBlock) -> None:
        """Quantize every planned reader of a shared input into `finished`, and choose the factors it is divided by.

        `originals` has the weights of the block as the source has them.
        """
        dense = not all(map(self.routing.is_expert, shared.readers))
        needs_gram = self.composition.needs_gram and (dense or shared.absorber is not None)
        statistics = input_statistics(
            shared.value,
            self.streams.rows(shared.value),
            shared.channels,
            self.pool,
            self.threads,
            with_gram=needs_gram,
        )
        factors = self._factors(shared, statistics, originals)
        if factors is not None:
            finished.factors[shared.value] = factors
            statistics = scaled(statistics, factors)
        for name in shared.readers:
            weight = originals[name].to(torch.float32)
            if factors is not None:
                weight = weight * torch.from_numpy(factors)
            if name not in self.plans:
                if factors is not None:
                    finished.plain[name] = weight.numpy()
            elif self.routing.is_expert(name):
                self._quantize_experts(name, weight, factors, finished)
            else:
                self._quantize_linear(name, weight.numpy(), statistics, finished)

    def _factors(
        self, shared: SharedInput, statistics: Calibration, originals: Mapping[str, Tensor]
    ) -> NDArray[np.float32] | None:
        """Choose the factors of a shared input; None when nothing absorbs them, or none are better."""
        folding, absorber = self.composition.folding, shared.absorber
        if folding is None or absorber is None or absorber.axis != 0 or statistics.tokens == 0:
            return None
        weights, schemes = [], []
        for name in shared.readers:
            plan = self.plans.get(name)
            if plan is None or plan.scheme is None:
                continue
            tensor = originals[name].to(torch.float32)
            parts = tensor[:_EXPERTS_THAT_CHOOSE] if self.routing.is_expert(name) else tensor[None]
            weights += [part.numpy() for part in parts]
            schemes += [plan.scheme] * len(parts)
        factors = folding.scales(shared.value, weights, schemes, statistics, ties=absorber.ties, threads=self.threads)
        return None if bool((factors == 1).all()) else factors

    def _quantize_linear(
        self, name: str, weight: NDArray[np.float32], statistics: Calibration, finished: FinishedBlock
    ) -> None:
        plan = self.plans[name]
        assert plan.scheme is not None
        result = self._method(plan.scheme).quantize(name, weight, plan.scheme, statistics, threads=self.threads)
        finished.quantized[name] = result.tensor
        if plan.scheme.activation is not None and plan.scheme.activation.static:
            finished.input_ranges[name] = float(_of(statistics.absolute_max).max()) or 1.0
        errors = _OutputErrors.of(self._rounded(name, weight), result, weight, statistics)
        self._report(name, result, [errors], [statistics.tokens], finished, result.remark)

    def _quantize_experts(
        self, name: str, weight: Tensor, factors: NDArray[np.float32] | None, finished: FinishedBlock
    ) -> None:
        """Quantize a stack of experts `[E, N, K]`, each from the rows that were routed to it."""
        plan = self.plans[name]
        assert plan.scheme is not None
        method = self._method(plan.scheme)
        results, errors, tokens = [], [], []
        for expert, matrix in enumerate(weight):
            statistics = input_statistics(
                f"of expert {expert} of {name}",
                self.routing.rows(name, expert, self.streams),
                matrix.shape[-1],
                self.pool,
                self.threads,
                with_gram=self.composition.needs_gram,
            )
            statistics = statistics if factors is None else scaled(statistics, factors)
            array = matrix.contiguous().numpy()
            chosen: Method = method if statistics.tokens else method_named("rtn")
            results.append(
                chosen.quantize(
                    f"{name}[{expert}]",
                    array,
                    plan.scheme,
                    statistics if statistics.tokens else None,
                    threads=self.threads,
                )
            )
            errors.append(_OutputErrors.of(self._rounded(name, array), results[-1], array, statistics))
            tokens.append(statistics.tokens)
        whole = QuantizedWeight(
            stack([result.tensor for result in results]),
            sum(result.squared_error for result in results),
            sum(result.squared_norm for result in results),
        )
        finished.quantized[name] = whole.tensor
        unseen = [str(expert) for expert, count in enumerate(tokens) if not count]
        remark = f"rounded to nearest, no token reached them: experts {', '.join(unseen)}" if unseen else ""
        self._report(name, whole, errors, tokens, finished, remark)

    def _method(self, scheme: TensorScheme) -> Method:
        """Return what quantizes to this type: rounding to nearest where the method of the composition does not."""
        rounding = self.composition.rounding
        return rounding if scheme.type in rounding.types else method_named("rtn")

    def _rounded(self, name: str, weight: NDArray[np.float32]) -> QuantizedWeight:
        """Round a weight to nearest in the planned format, which is what calibration is measured against."""
        scheme = self.plans[name].scheme
        assert scheme is not None
        return method_named("rtn").quantize(name, weight, scheme, threads=self.threads)

    def _report(
        self,
        name: str,
        result: QuantizedWeight,
        errors: Sequence[_OutputErrors],
        tokens: Sequence[int],
        finished: FinishedBlock,
        remark: str,
    ) -> None:
        plan = self.plans[name]
        energy = sum(error.energy for error in errors)
        finished.report.append(
            asdict(
                LayerReport(
                    name,
                    plan.shape,
                    plan.method,
                    str(plan.scheme),
                    result.tensor.bits_per_weight,
                    result.relative_error,
                    math.sqrt(sum(error.rounded for error in errors) / energy) if energy else None,
                    math.sqrt(sum(error.quantized for error in errors) / energy) if energy else None,
                    min(tokens),
                    remark,
                )
            )
        )


@dataclass(frozen=True)
class _OutputErrors:
    """Summed squares over outputs and tokens: of the outputs, and of their errors when rounded, and as quantized."""

    energy: float
    rounded: float
    quantized: float

    @classmethod
    def of(
        cls,
        rounded: QuantizedWeight,
        result: QuantizedWeight,
        weight: NDArray[np.float32],
        statistics: Calibration,
    ) -> _OutputErrors:
        def moment(matrix: NDArray[np.float32]) -> float:
            if statistics.gram is None:
                return statistics.tokens * float((np.square(matrix) @ statistics.mean_square).sum(dtype=np.float64))
            x = torch.from_numpy(matrix)
            return statistics.tokens * float(((x @ torch.from_numpy(statistics.gram)) * x).sum(dtype=torch.float64))

        return cls(
            moment(weight),
            max(0.0, moment(rounded.tensor.dequantize() - weight)),
            max(0.0, moment(result.tensor.dequantize() - weight)),
        )


def _of(array: NDArray[np.float32] | None) -> NDArray[np.float32]:
    assert array is not None
    return array
