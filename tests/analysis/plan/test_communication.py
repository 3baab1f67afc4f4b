"""Bytes on the axes, by hand for small cases."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.communication import Held, Link, Traffic, link_of, step_traffic
from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import Layout, Zero
from nvfp4_train.analysis.plan.local import build_on_meta, model_keys
from nvfp4_train.analysis.plan.parameters import Parameters
from nvfp4_train.config.parallel import ReduceDtype
from tests.support.configs import composed

LAYOUT = Layout(micro_batch_size=1, global_batch_size=16, sequence_length=512)


def traffic(layout: Layout, *overrides: str, hardware: str = "H100") -> dict[tuple[str, str], Traffic]:
    cfg = composed(*overrides)
    listed = Parameters(model=cfg.model, recipe=cfg.recipe)
    keys = model_keys(build_on_meta(cfg.model, cfg.recipe), cfg.recipe)
    held = Held(blocks=keys.blocks, is_first=False, is_last=False)
    found = step_traffic(held, parameters=listed, layout=layout, hardware=load_hardware(hardware))
    return {(item.axis, item.what.split()[0]): item for item in found}


def test_one_rank_sends_nothing():
    assert traffic(LAYOUT, "experiment=demo") == {}


def test_gradients_travel_once_a_step_and_weights_for_every_microbatch():
    layout = replace(LAYOUT, dp_shard=2)
    found = traffic(layout, "model=demo", "model.pattern=-", "recipe=bf16")
    matrices, norm = 2 * 256 * 1024, 256
    assert found["dp_shard", "reduce-scatter"].bytes == (matrices + norm) / 2 * 4
    gathers = 2 * 8  # forward and backward of 8 microbatches
    assert found["dp_shard", "all-gather"].bytes == (2 * matrices * gathers + 4 * norm) / 2  # norms stay
    kept = traffic(replace(layout, reshards=False), "model=demo", "model.pattern=-", "recipe=bf16")
    assert kept["dp_shard", "all-gather"].bytes == (2 * matrices + 4 * norm) / 2


def test_codes_take_less_than_a_third():
    layout = replace(LAYOUT, dp_shard=2)
    names = ("model=demo", "model.pattern=-", "recipe=nvfp4", "recipe.keep_bf16.last_blocks=0")
    codes = traffic(replace(layout, gathers_codes=True), *names)["dp_shard", "all-gather"].bytes
    assert codes == pytest.approx(4.5 / 16 * traffic(layout, *names)["dp_shard", "all-gather"].bytes, rel=1e-2)


def test_spread_weights_come_from_near_by_for_backward():
    layout = replace(LAYOUT, dp_shard=16)
    far, near = (
        traffic(replace(layout, reshard_ranks=ranks), "model=demo", "model.pattern=-", "recipe=bf16")
        for ranks in (0, 8)
    )
    norms = 256 * 4 * 15 / 16  # one microbatch; they are small and stay gathered
    assert near["dp_shard", "all-gather"].bytes - norms == (far["dp_shard", "all-gather"].bytes - norms) / 2
    assert near["near", "all-gather"].link is Link.domain
    assert near["dp_shard", "all-gather"].link is Link.network


def test_tensor_parallel_blocks_gather_and_scatter_activations():
    found = traffic(replace(LAYOUT, tp=2), "model=demo", "model.pattern=--", "recipe=bf16")
    tokens = 16 * 512
    assert found["tp", "all-gather"].bytes == 2 * 4 * tokens * 256 * 2 / 2  # blocks, passes, half of [T, D] in BF16


def test_sums_in_fp32_take_twice_as_much_as_in_bf16():
    layout = replace(LAYOUT, tp=2, tp_sum=ReduceDtype.fp32)
    found = traffic(layout, "model=demo", "model.pattern=--", "recipe=bf16")
    assert found["tp", "all-gather"].bytes == 2 * (2 * 2 + 2 * 4) * 16 * 512 * 256 / 2
    whole = traffic(replace(layout, sequence_parallel=False), "model=demo", "model.pattern=--", "recipe=bf16")
    assert whole["tp", "all-reduce"].bytes == 2 * (2 * 2 * 4) * 16 * 512 * 256 / 2


def test_deepspeed_sends_more_the_more_it_shards():
    names = ("model=demo", "model.pattern=-", "recipe=bf16")
    matrices, norm = 2 * 256 * 1024, 256
    zero = Zero(
        stage=1,
        offloads_optimizer=False,
        offloads_parameters=False,
        overlaps=False,
        reduce_bucket=1000,
        prefetch_bucket=1000,
        persistent_below=1000,
    )
    found = [traffic(replace(LAYOUT, dp_shard=2, zero=replace(zero, stage=stage)), *names) for stage in (1, 2, 3)]
    whole = (matrices + norm) * 4 / 2
    assert found[0]["dp_shard", "all-reduce"].bytes == 2 * whole
    assert found[1]["dp_shard", "all-reduce"].bytes == 2 * whole * 8
    assert found[0]["dp_shard", "all-gather"].bytes == found[1]["dp_shard", "all-gather"].bytes == whole
    assert found[2]["dp_shard", "reduce-scatter"].bytes == whole * 8
    assert found[2]["dp_shard", "all-gather"].bytes == (2 * 8 * matrices * 2 + norm * 4) / 2  # of matrices in BF16


def test_experts_send_each_token_to_each_of_its_experts():
    found = traffic(replace(LAYOUT, dp_shard=4, ep=4), "model=demo", "model.pattern=E", "recipe=bf16")
    routed = 4 * 512 * 2 * 256 * 2  # tokens of a rank in a step, experts of a token, width, BF16
    assert found["ep", "all-to-all"].bytes == routed * 4 * 3 / 4


def test_context_parallel_ranks_exchange_keys_and_states():
    found = traffic(replace(LAYOUT, cp=2), "model=demo", "model.pattern=M*", "recipe=bf16")
    assert set(found) >= {("cp", "keys"), ("cp", "states")}
    assert found["cp", "keys"].bytes == 16 * 256 * (2 * 2 * 32) * (2 + 4)  # BF16 there, sums in FP32 back
    assert found["cp", "states"].bytes == 16 * 4 * (512 * 64 + 16) * 2
    assert found["cp", "tokens"].bytes == 16 * 3 * (512 + 2 * 64) * (2 + 4)


@pytest.mark.parametrize(("window", "others", "back"), [(100, 99, 2), (129, 128, 2), (130, 3 * 128, 4)])
def test_a_window_that_ends_in_the_part_before_needs_the_neighbour_only(window: int, others: int, back: int):
    overrides = ("model=demo", "model.pattern=*", "recipe=bf16", f"model.attention.window_tokens={window}")
    found = traffic(replace(LAYOUT, cp=4), *overrides)
    assert found["cp", "keys"].bytes == 16 * others * (2 * 2 * 32) * (2 + back)
    assert ("cp", "keys") not in traffic(LAYOUT, *overrides)


def test_neighbouring_ranks_share_a_domain():
    hardware = load_hardware("H100")
    layout = replace(LAYOUT, tp=4, cp=2, dp_shard=4, ep=2)
    assert {axis: link_of(axis, layout, hardware) for axis in ("tp", "cp", "ep", "dp_shard")} == {
        "tp": Link.domain,
        "cp": Link.domain,
        "ep": Link.domain,
        "dp_shard": Link.network,
    }
