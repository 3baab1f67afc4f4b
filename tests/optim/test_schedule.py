import json
from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_train.config.batch import BatchConfig, RampConfig
from nvfp4_train.config.optimizer import WeightDecayShape
from nvfp4_train.config.scheduler import (
    ConstantConfig,
    CosineConfig,
    DecayShape,
    InverseSqrtConfig,
    LinearConfig,
    SchedulerConfig,
    WsdConfig,
)
from nvfp4_train.optim.schedule import global_batch_size, learning_rate, weight_decay
from tests.support.tiny import tiny_optimizer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/megatron_data/peer_golden.json").read_text())
CASES = GOLDEN["lr"]


def scheduler_of(case: dict) -> SchedulerConfig:
    common = {
        "max_lr": case["max_lr"],
        "min_lr": case["min_lr"],
        "warmup_init_lr": 0.0,
        "warmup_tokens": case["warmup"],
    }
    match case["style"]:
        case "linear":
            return LinearConfig(**common)
        case "cosine":
            return CosineConfig(**common)
        case "constant":
            del common["min_lr"]
            return ConstantConfig(**common)
        case "inverse-square-root":
            return InverseSqrtConfig(**common)
    return WsdConfig(
        **common,
        decay_fraction=case["wsd_decay_steps"] / case["decay_steps"],
        decay_shape=DecayShape(case["wsd"]),
    )


def name_of(case: dict) -> str:
    return f"{case['style']}-{case['wsd']}-warmup{case['warmup']}-wd_{case['wd'][0]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_learning_rate_equals_megatron(case):
    cfg = scheduler_of(case)
    for tokens, expected, _ in case["values"]:
        found = learning_rate(cfg, tokens=tokens, total_tokens=case["decay_steps"])
        # The golden values are doubles of the same formulas; a few ulps cover another order of two products.
        assert found == pytest.approx(expected, rel=1e-14, abs=0), tokens


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_weight_decay_equals_megatron(case):
    shape, start, end = case["wd"]
    cfg = replace(
        tiny_optimizer(), weight_decay_shape=WeightDecayShape(shape), weight_decay_start=start, weight_decay=end
    )
    for tokens, _, expected in case["values"]:
        found = weight_decay(cfg, tokens=tokens, total_tokens=case["decay_steps"])
        assert found == pytest.approx(expected, rel=1e-14, abs=0), tokens


def test_golden_file_covers_every_schedule():
    kinds = {type(scheduler_of(case)) for case in CASES}
    assert kinds == {WsdConfig, CosineConfig, LinearConfig, ConstantConfig, InverseSqrtConfig}
    assert {case["wsd"] for case in CASES if case["wsd"]} == {shape.value for shape in DecayShape}


def test_batch_ramp_equals_megatron():
    ramp = GOLDEN["ramp"]
    sequence_length = 32
    cfg = BatchConfig(
        sequence_length=sequence_length,
        micro_batch_size=ramp["mbs"],
        global_batch_size=ramp["gbs"],
        ramp=RampConfig(start=ramp["start"], increment=ramp["inc"], tokens=ramp["samples"] * sequence_length),
    )
    sequences = 0
    for _, consumed, expected, num_microbatches in ramp["iteration_consumed_gbs_nmb"]:
        assert sequences == consumed
        size = global_batch_size(cfg, tokens=consumed * sequence_length)
        assert size == expected
        assert size == num_microbatches * ramp["mbs"] * ramp["dp"]
        sequences += size


def test_no_ramp_is_the_full_batch_from_the_start():
    cfg = BatchConfig(
        sequence_length=8, micro_batch_size=2, global_batch_size=6, ramp=RampConfig(start=0, increment=0, tokens=0)
    )
    assert [global_batch_size(cfg, tokens=tokens) for tokens in (0, 1, 10**9)] == [6, 6, 6]


def test_ramp_boundary_is_exact_where_a_float_quotient_falls_short():
    """Third of an interval: 3 increments over 10 tokens change at tokens 4, 7 and 10."""
    cfg = BatchConfig(
        sequence_length=1, micro_batch_size=1, global_batch_size=4, ramp=RampConfig(start=1, increment=1, tokens=10)
    )
    assert [global_batch_size(cfg, tokens=tokens) for tokens in range(11)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_warmup_starts_at_its_initial_rate_and_decay_ends_at_the_minimum():
    cfg = WsdConfig(
        max_lr=1.0,
        min_lr=0.1,
        warmup_init_lr=0.25,
        warmup_tokens=4,
        decay_fraction=0.5,
        decay_shape=DecayShape.minus_sqrt,
    )
    rates = [learning_rate(cfg, tokens=tokens, total_tokens=16) for tokens in (0, 2, 4, 8, 10, 16, 17)]
    assert rates == pytest.approx([0.25, 0.625, 1.0, 1.0, 0.1 + 0.5 * 0.9, 0.1, 0.1])


def test_decay_of_the_whole_run_and_of_nothing():
    common = {"max_lr": 1.0, "min_lr": 0.0, "warmup_init_lr": 0.0, "warmup_tokens": 0, "decay_shape": DecayShape.linear}
    whole = WsdConfig(**common, decay_fraction=1.0)
    nothing = WsdConfig(**common, decay_fraction=0.0)
    assert learning_rate(whole, tokens=5, total_tokens=10) == 0.5
    assert learning_rate(nothing, tokens=10, total_tokens=10) == 1.0
