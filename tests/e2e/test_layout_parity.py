"""Every layout over ranks trains as one process does: one table, and what must hold for each of its rows.

To add a layout, add a row to `LAYOUTS`. Layouts of one world size are trained one after another by the same processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest

from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.config.run import Device
from nvfp4_train.engine.base import Engine
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from tests.support.engines import NVFP4_MICRO_BATCH_SIZE, build_tiny_engine, train, train_nvfp4
from tests.support.operands import (
    OperandName,
    Operands,
    has_similar_amax,
    is_equal,
    recorded_operands,
    share_of_equal_values,
)
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, parity_model, tiny_model

NUM_STEPS = 10
# Of values whose input differs by FP32 rounding: it may lie on the boundary between two codes.
SHARE_ON_BOUNDARIES = 1e-4
MODEL = parity_model()
FIRST_EXPERTS = 3  # the block
# An expert's tensor scale depends on which tokens it sees together, and all that follows depends on it.
MODEL_WITHOUT_EXPERTS = tiny_model("M*-M/*-")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A row of the table.

    Args:
        name: Of the test's case.
        world_size: Ranks.
        changes: What differs from a single process, for `parallel_layout`.
        reorders_sums: Whether activations are sums that a single process takes in another order. In BF16 they then
            round to another value now and then, and later operands differ by that; in FP32 codes are the same.
        moves_tokens: Whether experts see other tokens together than in a single process, so that their inputs
            are other tensors.
        is_slow: Whether it is left to the slow tests: what it combines stands in other rows.
    """

    name: str
    world_size: int
    changes: dict[str, Any] = field(default_factory=dict)
    reorders_sums: bool = False
    moves_tokens: bool = False
    is_slow: bool = False

    @property
    def cfg(self) -> ParallelConfig:
        return parallel_layout(**self.changes)


LAYOUTS = (
    Layout(name="dp2", world_size=2, changes={"replicate": 2}),
    Layout(name="fsdp2", world_size=2, changes={"shard": 2}),
    Layout(name="tp2", world_size=2, changes={"tp": 2, "sequence_parallel": False}, reorders_sums=True),
    Layout(name="tp2+sp", world_size=2, changes={"tp": 2}, reorders_sums=True),
    Layout(name="hsdp 2x2", world_size=4, changes={"replicate": 2, "shard": 2}),
    Layout(name="dp2 x tp2", world_size=4, changes={"replicate": 2, "tp": 2}, reorders_sums=True, is_slow=True),
    Layout(name="fsdp2 x tp2", world_size=4, changes={"shard": 2, "tp": 2}, reorders_sums=True),
    Layout(name="cp2", world_size=2, changes={"cp": 2}, reorders_sums=True, moves_tokens=True),
    Layout(name="ep2", world_size=2, changes={"ep": 2}, reorders_sums=True, moves_tokens=True),
    Layout(name="fsdp4, ep2", world_size=4, changes={"ep": 2}, reorders_sums=True, moves_tokens=True, is_slow=True),
    Layout(name="pp2 gpipe", world_size=2, changes={"pp": 2, "schedule": "gpipe"}, is_slow=True),
    Layout(name="pp2 1f1b", world_size=2, changes={"pp": 2}),
    Layout(name="pp2 interleaved", world_size=2, changes={"pp": 2, "schedule": "interleaved", "stages_per_rank": 2}),
    Layout(name="pp2 zero bubble", world_size=2, changes={"pp": 2, "schedule": "zero_bubble"}, is_slow=True),
    Layout(
        name="pp2 zero bubble, interleaved",
        world_size=2,
        changes={"pp": 2, "schedule": "zero_bubble", "stages_per_rank": 2},
    ),
    Layout(name="fsdp2 x pp2", world_size=4, changes={"pp": 2, "shard": 2}, is_slow=True),
    Layout(name="tp2 x pp2", world_size=4, changes={"pp": 2, "tp": 2}, reorders_sums=True),
    Layout(name="cp2 x tp2", world_size=4, changes={"cp": 2, "tp": 2}, reorders_sums=True, moves_tokens=True),
    Layout(
        name="fsdp2, ep2 x tp2",
        world_size=4,
        changes={"shard": 2, "tp": 2, "ep": 2},
        reorders_sums=True,
        moves_tokens=True,
        is_slow=True,
    ),
)


@dataclass(kw_only=True)
class Run:
    """What a layout, or one rank of it, did: loss and gradient norm of each step, and the operands of the first.

    Args:
        fp32: Without quantization.
        nvfp4: With BF16 activations.
        operands: Of `nvfp4`.
        precise: Operands with FP32 activations; only where those of `nvfp4` cannot be equal.
        without_experts: The same of the model that has none, where those cannot be equal either.
    """

    fp32: list[tuple[float, float]]
    nvfp4: list[tuple[float, float]]
    operands: Operands
    precise: Operands
    without_experts: Operands


def run_layout(runtime: Runtime, layout: Layout) -> Run:
    build = partial(build_tiny_engine, runtime, parallel=layout.cfg)
    precise = replace(nvfp4_recipe(), compute_dtype=ComputeDtype.fp32)
    nvfp4 = build(nvfp4_recipe(), model=MODEL)
    first, operands = first_step(nvfp4)
    return Run(
        fp32=train(build(cast_recipe(ComputeDtype.fp32), model=MODEL), range(NUM_STEPS)),
        nvfp4=first + train_nvfp4(nvfp4, range(1, NUM_STEPS)),
        operands=operands,
        precise=first_step(build(precise, model=MODEL))[1] if layout.reorders_sums else {},
        without_experts=first_step(build(precise, model=MODEL_WITHOUT_EXPERTS))[1] if layout.moves_tokens else {},
    )


def first_step(engine: Engine) -> tuple[list[tuple[float, float]], Operands]:
    with recorded_operands(tokens_per_microbatch=SEQUENCE_LENGTH * NVFP4_MICRO_BATCH_SIZE) as operands:
        losses = train_nvfp4(engine, range(1))
    return losses, operands


def run_layouts(runtime: Runtime, layouts: tuple[Layout, ...]) -> dict[str, Run]:
    return {layout.name: run_layout(runtime, layout) for layout in layouts}


@cache
def runs_of(world_size: int, *, is_slow: bool) -> list[dict[str, Run]]:
    """By rank and name of the layout."""
    layouts = tuple(layout for layout in LAYOUTS if (layout.world_size, layout.is_slow) == (world_size, is_slow))
    return run_on_ranks(run_layouts, world_size, layouts, timeout_seconds=600)


@pytest.fixture(scope="module")
def single() -> Iterator[Run]:
    runtime = start_runtime(Device.cpu)
    yield run_layout(runtime, Layout(name="single", world_size=1, reorders_sums=True, moves_tokens=True))
    stop_runtime()


@pytest.fixture(
    params=[
        pytest.param(layout, id=layout.name, marks=[pytest.mark.slow] if layout.is_slow else []) for layout in LAYOUTS
    ]
)
def layout(request) -> Layout:
    return request.param


@pytest.fixture
def ranks(layout) -> list[Run]:
    return [runs[layout.name] for runs in runs_of(layout.world_size, is_slow=layout.is_slow)]


def largest_difference(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a / b - 1) for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.distributed
def test_fp32_losses_and_gradient_norms_are_those_of_one_process(single, ranks):
    """Sums over ranks are taken in another order, nothing else differs."""
    for run in ranks:
        assert largest_difference(run.fp32, single.fp32) < 1e-5


@pytest.mark.distributed
def test_nvfp4_losses_follow_those_of_one_process(single, ranks):
    """From the second step on masters differ by FP32 rounding, which at times moves a value across a boundary."""
    for run in ranks:
        losses, expected = ([(loss,) for loss, _ in both.nvfp4] for both in (run, single))
        assert largest_difference(losses, expected) < 2e-3


@pytest.mark.distributed
def test_every_rank_knows_the_same_losses_and_gradient_norms(ranks):
    assert all(run.fp32 == ranks[0].fp32 and run.nvfp4 == ranks[0].nvfp4 for run in ranks)


@pytest.mark.distributed
def test_the_first_step_rounds_to_the_codes_of_one_process_with_the_same_random_bytes(single, layout, ranks):
    for run in ranks:
        if not layout.reorders_sums:
            assert [name for name, part in run.operands.items() if not is_equal(part, single.operands[name])] == []
        elif not layout.moves_tokens:
            assert_equal_codes(run.precise, single.precise)
        else:
            assert_equal_codes(run.without_experts, single.without_experts)
            before = {name: part for name, part in run.precise.items() if precedes_experts(name)}
            assert_equal_codes(before, single.precise)


@pytest.mark.distributed
def test_the_first_step_rounds_the_weights_of_one_process_bit_for_bit(single, ranks):
    for run in ranks:
        weights = [name for name in run.operands if is_weight(name)]
        assert [name for name in weights if not is_equal(run.operands[name], single.operands[name])] == []
        assert weights


def assert_equal_codes(found: Operands, expected: Operands) -> None:
    """All random keys, and all values but those whose input lies on a boundary, are equal."""
    assert {is_weight(name) for name in found} == {True, False}
    sizes = {name: part.values.numel() for name, part in found.items()}
    unequal = {
        name: round((1 - share_of_equal_values(part, expected[name])) * sizes[name]) for name, part in found.items()
    }
    assert sum(unequal.values()) <= SHARE_ON_BOUNDARIES * sum(sizes.values()), unequal
    assert [name for name, part in found.items() if not has_similar_amax(part, expected[name])] == []


def is_weight(name: OperandName) -> bool:
    return name[1].endswith(".w")


def precedes_experts(name: OperandName) -> bool:
    """Say whether an operand is a weight, or what the forward pass rounds before the first experts."""
    layer, operand, _ = name
    blocks = tuple(f"blocks.{index}." for index in range(FIRST_EXPERTS))
    return is_weight(name) or (operand.endswith(".x") and layer.startswith(blocks))


@pytest.mark.distributed
def test_together_the_ranks_round_everything(single, layout, ranks):
    """No row or column of an operand is missing; which tokens experts see is checked by what they compute."""
    for name, whole in single.operands.items():
        if layout.moves_tokens and ".experts." in name[0]:
            continue
        held = {
            (row, column)
            for run in ranks
            if (part := run.operands.get(name)) is not None
            for row in part.rows.tolist()[::8]
            for column in part.columns.tolist()[::8]
        }
        rows, columns = whole.values.shape
        assert held == {(row, column) for row in range(0, rows, 8) for column in range(0, columns, 8)}, name
