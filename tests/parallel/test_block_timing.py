from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from nvfp4_train.config.parallel import StageBalance
from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.engine.build import prepare_model
from nvfp4_train.parallel import block_timing
from nvfp4_train.parallel.block_timing import block_times, shared_block_times
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.runtime import Runtime
from nvfp4_train.parallel.stages import BlockCosts, plan_stages
from tests.support.engines import build_tiny_engine
from tests.support.ranks import run_on_ranks
from tests.support.recipes import nvfp4_recipe
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_model

PATTERN = "M*-EM-/*E"
CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> dict[str, float]:
    """Seconds that pass whenever a module of a class runs forward; nothing else takes time."""
    seconds: dict[str, float] = {}
    now = [0.0]
    original = nn.Module.__call__

    def call(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        now[0] += seconds.get(type(module).__name__, 0.0)
        return original(module, *inputs, **named)

    monkeypatch.setattr(nn.Module, "__call__", call)
    monkeypatch.setattr(block_timing.time, "perf_counter", lambda: now[0])
    return seconds


def prepared(recipe: RecipeConfig | None = None, pattern: str = PATTERN) -> Any:
    return prepare_model(tiny_model(pattern), recipe or nvfp4_recipe(), seed=0)


def test_blocks_and_ends_cost_what_the_clock_says(clock):
    clock |= {"Mamba2": 5.0, "Attention": 3.0, "Mlp": 2.0, "Moe": 7.0, "Embedding": 0.5, "MtpDepth": 4.0}
    model = prepared().model
    found = block_times(model, sequence_length=SEQUENCE_LENGTH, device=CPU)
    # the end has a depth with an attention and experts, and looks up the embeddings of later tokens; the experts' Moe
    # calls a shared Mlp
    assert found == BlockCosts(blocks=[5.0, 3.0, 2.0, 9.0, 5.0, 2.0], before=0.5, after=0.5 + 4.0 + 3.0 + 9.0)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_each_sort_of_block_is_measured_once(monkeypatch):
    measured: list[str] = []
    monkeypatch.setattr(block_timing, "_measure", lambda name, *_, **__: float(measured.append(name) or len(measured)))
    recipe = nvfp4_recipe()
    first_in_bf16 = replace(recipe, keep_bf16=replace(recipe.keep_bf16, first_blocks=1))
    found = block_times(prepared(first_in_bf16, "MMMM").model, sequence_length=SEQUENCE_LENGTH, device=CPU)
    assert measured == ["blocks.0", "blocks.1", "", ""]
    assert found == BlockCosts(blocks=[1.0, 2.0, 2.0, 2.0], before=3.0, after=4.0)


def test_measured_costs_divide_the_model():
    model = prepared(pattern="MMMM").model
    slow_last = BlockCosts(blocks=[1.0, 1.0, 1.0, 9.0], before=0.0, after=0.0)
    plans = plan_stages(model, parallel_layout(pp=2), sequence_length=SEQUENCE_LENGTH, costs=slow_last)
    assert [plan.blocks for plan in plans] == [range(3), range(3, 4)]
    assert [plan.cost for plan in plans] == [3.0, 9.0]


def on_two_ranks(runtime: Runtime) -> dict[str, Any]:
    mesh = build_mesh(parallel_layout(pp=2), runtime)
    costs = shared_block_times(prepared().model, sequence_length=SEQUENCE_LENGTH, mesh=mesh)
    layout = parallel_layout(pp=2, stage_balance=StageBalance.time)
    engine = build_tiny_engine(runtime, nvfp4_recipe(), model=tiny_model(PATTERN), parallel=layout)
    names = {name.split(".")[1] for name, _ in engine.model.named_parameters() if name.startswith("blocks.")}
    return {"costs": costs, "blocks": names}


@pytest.mark.distributed
def test_all_ranks_divide_by_what_rank_0_measured():
    first, second = run_on_ranks(on_two_ranks, 2)
    assert first["costs"] == second["costs"]
    assert all(value > 0 for value in (*first["costs"].blocks, first["costs"].before, first["costs"].after))
    assert first["blocks"] | second["blocks"] == {str(index) for index in range(6)}
    assert not first["blocks"] & second["blocks"]


def no_memory(*_: Any, **__: Any) -> BlockCosts:
    raise torch.OutOfMemoryError("9 GiB too many")


def out_of_memory(runtime: Runtime) -> str:
    mesh = build_mesh(parallel_layout(pp=2), runtime)
    with patch.object(block_timing, "block_times", no_memory), pytest.raises(ConfigError) as error:
        shared_block_times(prepared().model, sequence_length=SEQUENCE_LENGTH, mesh=mesh)
    return str(error.value)


@pytest.mark.distributed
def test_a_block_that_does_not_fit_rank_0_is_told_on_all():
    for told in run_on_ranks(out_of_memory, 2):
        assert "parallel.stage_balance = time" in told
        assert "9 GiB too many" in told
