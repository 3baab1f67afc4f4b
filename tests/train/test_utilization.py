import logging

import pytest
import torch

from nvfp4_train.engine.build import prepare_model
from nvfp4_train.model.flops import count_flops
from nvfp4_train.model.peaks import Peak, Precision
from nvfp4_train.train.utilization import Utilization, build_utilization
from tests.support.configs import composed


def test_one_precision():
    usage = Utilization(flops_per_token={Precision.bf16: 2e12}, num_devices=4, peak=Peak(fp32=1e12, bf16=1e13))
    assert usage.metrics(8.0) == {
        "perf/model_tflops_per_device": 4.0,
        "perf/fp4_flops_share": 0.0,
        "perf/mfu": pytest.approx(0.4),
    }


def test_as_fast_as_the_device_can_is_1():
    flops = {Precision.fp32: 1e10, Precision.bf16: 2e12, Precision.fp8: 1e12, Precision.fp4: 5e12}
    peak = Peak(fp32=1e12, bf16=1e13, fp8=2e13, fp4=4e13)
    seconds = 1e10 / 1e12 + 2e12 / 1e13 + 1e12 / 2e13 + 5e12 / 4e13
    usage = Utilization(flops_per_token=flops, num_devices=1, peak=peak)
    assert usage.metrics(1 / seconds)["perf/mfu"] == pytest.approx(1)


@pytest.mark.parametrize(("recipe", "narrow"), [("nvfp4", "fp4"), ("mxfp8", "fp8"), ("bf16", None), ("fp32", None)])
def test_what_a_model_multiplies(recipe, narrow, caplog):
    caplog.set_level(logging.INFO, logger="nvfp4_train")
    cfg = composed("model=tiny", f"recipe={recipe}")
    prepared = prepare_model(cfg.model, cfg.recipe, seed=0)
    usage = build_utilization(
        prepared.model, prepared.plan, sequence_length=64, device=torch.device("cpu"), num_devices=1
    )
    report = count_flops(prepared.model, document_lengths=[64])
    assert sum(usage.flops_per_token.values()) == pytest.approx(report.model_per_token)
    assert set(usage.flops_per_token) == {cfg.recipe.compute_dtype.value, *([narrow] if narrow else [])}
    assert usage.peak is None
    assert "perf/mfu" not in usage.metrics(1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "perf/mfu is not logged: nvfp4_train/model/peaks.py has no peak of the device 'cpu'"
    ]


def test_the_share_in_fp4_is_that_of_the_coverage_report_among_linears():
    cfg = composed("model=tiny", "recipe=nvfp4")
    prepared = prepare_model(cfg.model, cfg.recipe, seed=0)
    usage = build_utilization(
        prepared.model, prepared.plan, sequence_length=64, device=torch.device("cpu"), num_devices=1
    )
    linears = sum(3 * row.flops_per_token for row in prepared.plan.coverage)
    assert usage.flops_per_token[Precision.fp4] == pytest.approx(prepared.plan.flops_share_low_precision * linears)
