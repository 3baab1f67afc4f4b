"""How much of what its devices can do a run uses."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nvfp4_train.model.flops import count_flops
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.peaks import Peak, Precision, fastest_seconds, find_peak
from nvfp4_train.precision.coverage import PrecisionPlan

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """Turns a throughput into model FLOP/s and their share of the peak.

    Args:
        flops_per_token: Model FLOPs of forward and backward by what is multiplied.
        num_devices: That share the work.
        peak: Of one device; None where it is not known.
    """

    flops_per_token: Mapping[Precision, float]
    num_devices: int
    peak: Peak | None

    def metrics(self, tokens_per_second: float) -> dict[str, float]:
        """Return the metrics of a throughput of all devices together.

        Model FLOPs utilization is the shortest time that the devices could take, divided by the time they took. Each
        GEMM is held against the peak of the precision of its operands: with one precision that is the usual
        FLOP/s divided by the peak, with several 1 stays the limit.
        """
        total = sum(self.flops_per_token.values())
        tokens_per_second /= self.num_devices
        values = {
            "perf/model_tflops_per_device": total * tokens_per_second / 1e12,
            "perf/fp4_flops_share": self.flops_per_token.get(Precision.fp4, 0.0) / total,
        }
        if self.peak is not None:
            values["perf/mfu"] = fastest_seconds(self.flops_per_token, peak=self.peak) * tokens_per_second
        return values


def build_utilization(
    model: HybridLM, plan: PrecisionPlan, *, sequence_length: int, device: torch.device, num_devices: int
) -> Utilization:
    """Count the FLOPs of a model and find the peak of the devices; says once if there is none.

    A sequence counts as one document: shorter ones need less attention, so that utilization is overstated by that.

    Args:
        model: Before or after it is sharded.
        plan: What each of its Linears multiplies.
        sequence_length: Tokens of a sequence.
        device: One of them; all are alike.
        num_devices: Of the run.
    """
    report = count_flops(model, document_lengths=[sequence_length])
    gemms = {row.module: row.gemm_precisions for row in plan.coverage}
    flops = report.by_precision(gemms, otherwise=Precision(plan.compute_dtype.value))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = find_peak(name)
    if peak is None:
        _logger.info("perf/mfu is not logged: nvfp4_train/model/peaks.py has no peak of the device %r", name)
    return Utilization(
        flops_per_token={precision: amount / report.num_tokens for precision, amount in flops.items()},
        num_devices=num_devices,
        peak=peak,
    )
