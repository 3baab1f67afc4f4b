import pytest

from nvfp4_train.model.peaks import PEAKS, Peak, Precision, fastest_seconds, find_peak


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
    ],
)
def test_devices_are_found_by_their_names(name, bf16):
    assert find_peak(name).bf16 == bf16


@pytest.mark.parametrize("name", ["cpu", "NVIDIA H20", "NVIDIA H200 MIG 1g.18gb"])
def test_an_unknown_device_has_no_peak(name):
    assert find_peak(name) is None


def test_a_name_is_not_hidden_by_an_earlier_one():
    assert all(find_peak(f"NVIDIA {name}") is peak for name, peak in PEAKS.items())


def test_ratios_are_those_of_the_paper():
    """https://arxiv.org/abs/2509.25149: FP4 is 4 times BF16 on GB200 and 6 times on GB300, FP8 twice."""
    for name, ratio in (("GB200", 4), ("GB300", 6)):
        assert PEAKS[name].fp4 == ratio * PEAKS[name].bf16
    assert all(peak.fp8 == pytest.approx(2 * peak.bf16, rel=1e-3) for name, peak in PEAKS.items() if name != "A100")


def test_each_part_is_held_against_its_own_peak():
    peak = Peak(fp32=1e14, bf16=1e15, fp8=2e15, fp4=4e15)
    parts = {Precision.fp32: 1e14, Precision.bf16: 1e15, Precision.fp8: 2e15, Precision.fp4: 4e15}
    assert [fastest_seconds({precision: amount}, peak=peak) for precision, amount in parts.items()] == [1] * 4
    assert fastest_seconds(parts, peak=peak) == 4


def test_what_a_device_emulates_counts_as_bf16():
    peak = Peak(fp32=1e14, bf16=1e15)
    assert fastest_seconds({Precision.fp4: 2e15, Precision.fp8: 1e15}, peak=peak) == 3
