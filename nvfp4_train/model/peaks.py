"""Peak speeds of accelerators, and how much of them a step uses."""

from dataclasses import dataclass

from nvfp4_train.model.flops import FlopsReport


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense tensor-core peak of one device, in FLOP/s.

    Args:
        bf16: Of BF16 products with FP32 accumulation.
        fp8: Of FP8 products; None where there are none.
        fp4: Of FP4 products; None where there are none, and they are emulated in BF16.
    """

    bf16: float
    fp8: float | None = None
    fp4: float | None = None


# By a part of the name that torch.cuda.get_device_name() gives; the first that fits. Dense figures: data sheets often
# quote twice these, with sparsity.
# Sources: the data sheets of A100 (2021), H100 (2023) and H200 (2023), of the DGX B200, GB200 NVL72 and GB300 NVL72
# (per GPU); FP4 is 4 times BF16 on GB200 and 6 times on GB300 according to https://arxiv.org/abs/2509.25149.
PEAKS = {
    "A100": Peak(bf16=312e12),
    "H100 PCIe": Peak(bf16=756e12, fp8=1513e12),
    "H100": Peak(bf16=989e12, fp8=1979e12),
    "H200": Peak(bf16=989e12, fp8=1979e12),
    "GB300": Peak(bf16=2500e12, fp8=5000e12, fp4=15000e12),
    "GB200": Peak(bf16=2500e12, fp8=5000e12, fp4=10000e12),
    "B200": Peak(bf16=2250e12, fp8=4500e12, fp4=9000e12),
}


def find_peak(device_name: str) -> Peak | None:
    """Return the peak of a device, or None for one that is not in the table (every CPU)."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


def model_flops_utilization(
    report: FlopsReport, *, seconds: float, peak: Peak, num_devices: int, low_precision_flops: float
) -> float:
    """Return the shortest time that the devices could take for a step, divided by the time it took.

    With one precision that is the usual model FLOPs / (seconds x peak). With two, each part is held against the peak
    of its own precision, so that 1 stays the limit.

    Args:
        report: Of all tokens of the step.
        seconds: That the step took.
        peak: Of one device.
        num_devices: That shared the step.
        low_precision_flops: Model FLOPs of `report` in 4-bit GEMMs, `FlopsReport.low_precision`.
    """
    fastest = low_precision_flops / (peak.fp4 or peak.bf16) + (report.model - low_precision_flops) / peak.bf16
    return fastest / num_devices / seconds
