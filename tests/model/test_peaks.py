import pytest

from nvfp4_train.model.flops import FlopsReport, FlopsRow, Product
from nvfp4_train.model.peaks import PEAKS, Peak, find_peak, model_flops_utilization

ROW = FlopsRow(module="lm_head", product=Product.linear, forward=1e15, executed_forward=1e15)
REPORT = FlopsReport(rows=[ROW], num_tokens=100)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA GB200", 2500e12), ("NVIDIA B200", 2250e12)],
)
def test_devices_are_found_by_their_names(name, bf16):
    assert find_peak(name).bf16 == bf16


def test_an_unknown_device_has_no_peak():
    assert find_peak("cpu") is None


def test_a_name_is_not_hidden_by_an_earlier_one():
    assert all(find_peak(f"NVIDIA {name}") is peak for name, peak in PEAKS.items())


def test_one_precision():
    peak = Peak(bf16=1e15)
    assert model_flops_utilization(REPORT, seconds=6, peak=peak, num_devices=1, low_precision_flops=0) == 0.5
    assert model_flops_utilization(REPORT, seconds=6, peak=peak, num_devices=2, low_precision_flops=0) == 0.25


def test_each_part_is_held_against_its_own_peak():
    peak = Peak(bf16=1e15, fp4=4e15)
    full = model_flops_utilization(REPORT, seconds=2 / 4 + 1, peak=peak, num_devices=1, low_precision_flops=2e15)
    assert full == pytest.approx(1)
    emulated = Peak(bf16=1e15)
    assert model_flops_utilization(REPORT, seconds=3, peak=emulated, num_devices=1, low_precision_flops=2e15) == 1
