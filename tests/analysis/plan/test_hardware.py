"""The table of accelerators: complete, sourced and consistent."""

import pytest

from nvfp4_train.analysis.plan.hardware import Label, hardware_names, load_hardware
from nvfp4_train.config.problem import ConfigError
from nvfp4_train.model.peaks import find_peak
from nvfp4_train.numerics.spec import Format


def test_the_asked_accelerators_are_there():
    assert set(hardware_names()) == {"H100", "H200", "B200", "GB200", "GB300", "MI355X"}


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_has_a_source_and_a_label(name: str):
    hardware = load_hardware(name)
    for key, figure in hardware.figures.items():
        assert "https://" in figure.source, key
        assert figure.label in (Label.published, Label.modelled)
        assert figure.note or figure.label is Label.published, f"{key}: a modelled figure says how"
        assert getattr(hardware, key) == figure.value


@pytest.mark.parametrize("name", hardware_names())
def test_figures_are_plausible(name: str):
    hardware = load_hardware(name)
    assert hardware.fp8 is not None
    assert 1.9 < hardware.fp8 / hardware.bf16 < 2.1
    assert (hardware.fp4 is None) == (not hardware.fp4_formats)
    assert hardware.fp4 is None or hardware.fp4 >= 1.9 * hardware.fp8
    assert 50e9 <= hardware.memory <= 300e9
    assert hardware.network < hardware.domain_bandwidth < hardware.memory_bandwidth


@pytest.mark.parametrize("name", ["H100", "H200", "B200", "GB200", "GB300"])
def test_peaks_are_those_that_utilization_is_held_against(name: str):
    hardware, peak = load_hardware(name), find_peak(name)
    assert peak is not None
    assert (hardware.bf16, hardware.fp8, hardware.fp4) == (peak.bf16, peak.fp8, peak.fp4)


def test_amd_has_no_nvfp4_units():
    assert load_hardware("MI355X").fp4_formats == (Format.mxfp4,)
    assert Format.nvfp4 in load_hardware("gb200").fp4_formats


def test_an_unknown_name_is_an_error_with_a_hint():
    with pytest.raises(ConfigError) as error:
        load_hardware("gb20")
    [problem] = error.value.problems
    assert problem.key == "--hardware"
    assert "GB200" in problem.fix


def test_a_price_replaces_the_listed_one():
    hardware = load_hardware("H100").with_price(1.5)
    assert hardware.price == hardware.figures["price"].value == 1.5
    assert hardware.figures["price"].source == "--price"
