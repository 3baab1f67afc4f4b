"""Peak speeds of accelerators, and how much of them a step uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Precision(StrEnum):
    """What a matrix product multiplies, from wide to narrow."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"
    fp4 = "fp4"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense peak of one device, in FLOP/s.

    Args:
        fp32: Of FP32 products outside the tensor cores; TF32 is not FP32.
        bf16: Of BF16 products with FP32 accumulation.
        fp8: Of FP8 products; None where there are none.
        fp4: Of FP4 products; None where there are none.
    """

    fp32: float
    bf16: float
    fp8: float | None = None
    fp4: float | None = None

    def of(self, precision: Precision) -> float:
        """Return the peak of a precision; where the device has no such products, that of BF16, which emulates them."""
        return getattr(self, precision.value) or self.bf16


# By a part of the name that torch.cuda.get_device_name() gives; the first that fits.
#
# NVIDIA prints the figures of tensor cores with sparsity, for BF16 and FP8 twice the dense ones, and FP4 both ways
# (sparse | dense), on Blackwell Ultra not twice. What is printed for a board of 8 or a rack of 72 GPUs is divided by
# their number. In TFLOPS, PFLOPS where it says so:
#
#   A100    BF16 312 dense. NVIDIA A100 Tensor Core GPU data sheet,
#           https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
#   H100    SXM: BF16 1,979, FP8 3,958; NVL: BF16 1,671, FP8 3,341. https://www.nvidia.com/en-us/data-center/h100/
#           PCIe, no longer sold: BF16 1,513, FP8 3,026 in the data sheet of 2022,
#           https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
#   H200    SXM and NVL as H100. https://www.nvidia.com/en-us/data-center/h200/ ; GH200 holds the same GPU.
#   B200    HGX B200: BF16 36 PFLOPS, FP8 72, FP4 144 | 72. https://www.nvidia.com/en-us/data-center/hgx/
#   B300    HGX B300: BF16 36 PFLOPS, FP8 72, FP4 144 | 108. Same page.
#   GB200   NVL72: BF16 360 PFLOPS, FP8 720, FP4 1,440 | 720. https://www.nvidia.com/en-us/data-center/gb200-nvl72/
#   GB300   NVL72: BF16 360 PFLOPS, FP8 720, FP4 1,440 | 1,080. https://www.nvidia.com/en-us/data-center/gb300-nvl72/
#
# FP4 is then 4 times BF16 on GB200 and 6 times on GB300, as https://arxiv.org/abs/2509.25149 says.
PEAKS = {
    "A100": Peak(fp32=19.5e12, bf16=312e12),
    "H100 PCIe": Peak(fp32=51e12, bf16=756.5e12, fp8=1513e12),
    "H100 NVL": Peak(fp32=60e12, bf16=835.5e12, fp8=1670.5e12),
    "H100": Peak(fp32=67e12, bf16=989.5e12, fp8=1979e12),
    "H200 NVL": Peak(fp32=60e12, bf16=835.5e12, fp8=1670.5e12),
    "H200": Peak(fp32=67e12, bf16=989.5e12, fp8=1979e12),
    "GB300": Peak(fp32=80e12, bf16=2500e12, fp8=5000e12, fp4=15000e12),
    "GB200": Peak(fp32=80e12, bf16=2500e12, fp8=5000e12, fp4=10000e12),
    "B300": Peak(fp32=75e12, bf16=2250e12, fp8=4500e12, fp4=13500e12),
    "B200": Peak(fp32=75e12, bf16=2250e12, fp8=4500e12, fp4=9000e12),
}
SLICE = "MIG"  # in the name of a part of a GPU, whose peak is not in the table


def find_peak(device_name: str) -> Peak | None:
    """Return the peak of a device, or None for one that is not in the table (every CPU, every slice of a GPU)."""
    if SLICE in device_name:
        return None
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


def fastest_seconds(flops: Mapping[Precision, float], *, peak: Peak) -> float:
    """Return the shortest time that one device could take for products of several precisions.

    Each part is held against the peak of its own precision, so that a utilization of 1 stays the limit. FP4 that a
    device only emulates, in BF16, counts at the peak of BF16.
    """
    return sum(amount / peak.of(precision) for precision, amount in flops.items())
