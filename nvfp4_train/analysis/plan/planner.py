"""A plan: what a configuration needs and takes in one layout on named hardware."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial

from nvfp4_train.analysis.plan.activations import Activations
from nvfp4_train.analysis.plan.communication import Held, Traffic, step_traffic
from nvfp4_train.analysis.plan.layout import Layout, layout_problems, parallel_of
from nvfp4_train.analysis.plan.local import BlockKey, BuiltModel, ModelKeys, build_on_meta, model_keys
from nvfp4_train.analysis.plan.memory import Memory, MemoryModel
from nvfp4_train.analysis.plan.optimizer_state import measure_state
from nvfp4_train.analysis.plan.parameters import Parameters, held_ends, num_parameters, reads_embedding_twice
from nvfp4_train.analysis.plan.step_time import BlockTimer, Machine, StepTime, step_time
from nvfp4_train.analysis.plan.work import LinearWork, Work
from nvfp4_train.analysis.plan.zero import ZeroElements, zero_elements, zero_memory
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.optimizer import OptimizerConfig
from nvfp4_train.config.problem import ConfigError, Problem, require
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.model.flops import FlopsReport, count_flops
from nvfp4_train.model.peaks import Precision
from nvfp4_train.parallel.stages import StagePlan, plan_stages

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage of the pipeline.

    Args:
        stage: Its blocks and its rank.
        num_parameters: On one tp and ep rank, before they are sharded.
        flops: Model FLOPs, forward and backward, of a step over all ranks.
        kept_blocks: Blocks of which some Linear stays in the compute dtype.
    """

    stage: StagePlan
    num_parameters: int
    flops: float
    kept_blocks: list[int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is predicted to need and to take.

    Args:
        layout: How ranks share it.
        machine: What they are.
        stages: Of the pipeline.
        memory: Of each pipeline rank.
        traffic: Of the pipeline rank that is slowest.
        time: Of the same rank.
        flops: Model FLOPs of a step, forward and backward.
        low_precision_flops: Those of them in products of two 4-bit operands.
        total_tokens: Of the run.
    """

    layout: Layout
    machine: Machine
    stages: list[PlannedStage]
    memory: list[Memory]
    traffic: list[Traffic]
    time: StepTime
    flops: float
    low_precision_flops: float
    total_tokens: int

    @property
    def peak_memory(self) -> float:
        """Bytes of the rank that holds most."""
        return max(memory.total for memory in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return self.peak_memory <= self.machine.hardware.memory

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.layout.global_batch_size * self.layout.sequence_length / self.time.total

    @property
    def days(self) -> float:
        """Of the whole run, without evaluations, checkpoints and failures."""
        return self.total_tokens / self.tokens_per_second / SECONDS_PER_DAY

    @property
    def cost(self) -> float:
        """USD of all devices for those days."""
        return self.days * 24 * self.layout.devices * self.machine.hardware.price


@dataclass(kw_only=True)
class Planner:
    """Plans a model in any layout; what it finds out about blocks serves all of them.

    Args:
        model: The model.
        recipe: Its recipe.
        optimizer: Its optimizer.
        machine: The hardware.
        total_tokens: Of the run.
    """

    model: ModelConfig
    recipe: RecipeConfig
    optimizer: OptimizerConfig
    machine: Machine
    total_tokens: int
    parameters: Parameters = field(init=False)
    activations: Activations = field(init=False)
    work: Work = field(init=False)
    _ends: dict[int, list[LinearWork]] = field(init=False, default_factory=dict)
    _widths: dict[int, list[Problem]] = field(init=False, default_factory=dict)
    _stages: dict[tuple[object, ...], list[StagePlan]] = field(init=False, default_factory=dict)
    _timers: dict[Machine, BlockTimer] = field(init=False, default_factory=dict)
    _reports: dict[int, FlopsReport] = field(init=False, default_factory=dict)
    _elements: dict[Layout, ZeroElements] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = Parameters(model=self.model, recipe=self.recipe)
        self.activations = Activations(model=self.model, recipe=self.recipe)
        self.work = Work(model=self.model, recipe=self.recipe)

    @cached_property
    def built(self) -> BuiltModel:
        """The whole model on the meta device.

        Raises:
            ConfigError: where it does not fit the recipe.
        """
        return build_on_meta(self.model, self.recipe)

    @cached_property
    def keys(self) -> ModelKeys:
        """What each block is."""
        return model_keys(self.built, self.recipe)

    @property
    def timer(self) -> BlockTimer:
        """Times blocks on the present machine."""
        if self.machine not in self._timers:
            self._timers[self.machine] = BlockTimer(machine=self.machine, work=self.work)
        return self._timers[self.machine]

    @cached_property
    def memory(self) -> MemoryModel:
        """Adds up what ranks hold."""
        return MemoryModel(
            keys=self.keys,
            parameters=self.parameters,
            activations=self.activations,
            state=measure_state(self.model, self.optimizer),
            compute_dtype=self.recipe.compute_dtype,
        )

    def memory_of(self, layout: Layout, *, rank: int = 0, shard: int = 0) -> Memory:
        """Return the memory of a rank.

        Args:
            layout: How ranks share the run.
            rank: Along pp.
            shard: Along dp_shard x cp, of what FSDP shards unevenly; the first rank holds most.
        """
        stages = self.stages(layout)
        found = self.memory.of_rank(stages, layout, rank=rank, shard=shard)
        if layout.zero is None:
            return found
        largest = max(num_parameters(self.parameters.block(key, layout)) for key in set(self.keys.blocks))
        if layout not in self._elements:
            self._elements[layout] = zero_elements(self.built.model, layout)
        return zero_memory(found, self._elements[layout], layout, largest_block=largest)

    def problems(self, layout: Layout, *, devices: int) -> list[Problem]:
        """Return everything that is wrong with running the model in a layout."""
        found = problems_of(lambda: self.keys)
        found += layout_problems(layout, self.model, devices=devices)
        return found if found else self.width_problems(layout)

    def width_problems(self, layout: Layout) -> list[Problem]:
        """Return which widths of a tp rank the recipe's blocks do not divide."""
        if layout.tp not in self._widths:
            found = []
            for key in dict.fromkeys(self.keys.blocks):
                found += problems_of(partial(self.parameters.block, key, layout))
            self._widths[layout.tp] = list({problem.key: problem for problem in found}.values())
        return self._widths[layout.tp]

    def rank_memory(self, layout: Layout) -> Memory:
        """Return the memory of the first or the last pipeline rank, whichever needs more.

        Between them ranks hold fewer microbatches than the first, and no head.
        """
        found = [self.memory_of(layout, rank=rank) for rank in {0, layout.pp - 1}]
        return max(found, key=lambda memory: memory.total)

    def plan(self, layout: Layout) -> Plan:
        """Predict a layout that has no problems."""
        stages = self.stages(layout)
        ranks = range(layout.pp)
        time, traffic = self._slowest(stages, layout, ranks=ranks)
        report = self._flops(layout)
        sequences = layout.global_batch_size
        return Plan(
            layout=layout,
            machine=self.machine,
            stages=[self._describe(stage, layout, report) for stage in stages],
            memory=[self.memory_of(layout, rank=rank) for rank in ranks],
            traffic=traffic,
            time=time,
            flops=report.model * sequences,
            low_precision_flops=self._by_precision(report).get(Precision.fp4, 0.0) * sequences,
            total_tokens=self.total_tokens,
        )

    def step_time(self, layout: Layout) -> StepTime:
        """Return the time of the slowest pipeline rank, without looking at memory."""
        return self._slowest(self.stages(layout), layout, ranks=range(layout.pp))[0]

    def quick_seconds(self, layout: Layout) -> float:
        """Return about the same, from the first, the middle and the last rank of a pipeline, which is balanced."""
        ranks = {0, layout.pp // 2, layout.pp - 1}
        return self._slowest(self.stages(layout), layout, ranks=ranks)[0].total

    def stages(self, layout: Layout) -> list[StagePlan]:
        """Divide the blocks over the pipeline as an engine does."""
        key = (layout.pp, layout.num_virtual_stages, layout.schedule, layout.sequence_length)
        if key not in self._stages:
            self._stages[key] = plan_stages(
                self.built.model, parallel_of(layout), sequence_length=layout.sequence_length
            )
        return self._stages[key]

    def ends(self, layout: Layout) -> list[LinearWork]:
        """Return the Linears outside blocks, and those of the blocks of multi-token prediction."""
        if layout.tp not in self._ends:
            mtp = [
                linear
                for key in self.keys.mtp
                for linear in self.work.block(key, layout).linears
                for _ in range(self.model.layer_pattern.num_mtp_depths)
            ]
            self._ends[layout.tp] = self.work.ends(layout) + mtp
        return self._ends[layout.tp]

    def _own(self, stages: list[StagePlan], *, rank: int) -> list[StagePlan]:
        return [stage for stage in stages if stage.rank == rank]

    def _blocks(self, own: list[StagePlan]) -> list[BlockKey]:
        return [self.keys.blocks[index] for stage in own for index in stage.blocks]

    def _slowest(
        self, stages: list[StagePlan], layout: Layout, *, ranks: Iterable[int]
    ) -> tuple[StepTime, list[Traffic]]:
        """Return the time of the slowest of some pipeline ranks, and what it sends."""
        owns = [self._own(stages, rank=rank) for rank in ranks]
        different = {}
        for own in owns:
            held = self._held(own, stages, layout)
            key = (frozenset(Counter(held.blocks).items()), held.is_first, held.is_last, held.num_sent)
            different[key] = own, held
        found = []
        for own, held in different.values():
            traffic = self._traffic(held, layout)
            found.append((self._time(own, traffic, layout), traffic))
        return max(found, key=lambda pair: pair[0].total)

    def rank_traffic(self, layout: Layout, *, rank: int) -> list[Traffic]:
        """Return what a pipeline rank sends in a step."""
        stages = self.stages(layout)
        return self._traffic(self._held(self._own(stages, rank=rank), stages, layout), layout)

    def _held(self, own: list[StagePlan], stages: list[StagePlan], layout: Layout) -> Held:
        """Return what a rank has; a stage sends its result to the next one, and a gradient to the one before."""
        is_first, is_last = any(stage.is_first for stage in own), any(stage.is_last for stage in own)
        depths = self.model.layer_pattern.num_mtp_depths if is_last else 0
        neighbours = [
            stages[index].rank
            for stage in own
            for index in (stage.index - 1, stage.index + 1)
            if 0 <= index < len(stages)
        ]
        ends = self.parameters.ends(layout)
        return Held(
            blocks=tuple(self._blocks(own)),
            mtp=self.keys.mtp * depths,
            num_depths=depths,
            ends=held_ends(ends, is_first=is_first, is_last=is_last),
            is_first=is_first,
            is_last=is_last,
            shares_embedding=is_first != is_last and reads_embedding_twice(ends),
            num_sent=sum(rank != own[0].rank for rank in neighbours),
        )

    def _traffic(self, held: Held, layout: Layout) -> list[Traffic]:
        return step_traffic(held, parameters=self.parameters, layout=layout, hardware=self.machine.hardware)

    def _time(self, own: list[StagePlan], traffic: list[Traffic], layout: Layout) -> StepTime:
        ends = self.ends(layout) if any(stage.is_last for stage in own) else []
        return step_time(self._blocks(own), ends, traffic, layout=layout, timer=self.timer)

    def _flops(self, layout: Layout) -> FlopsReport:
        length = layout.sequence_length
        if length not in self._reports:
            self._reports[length] = count_flops(self.built.model, document_lengths=[length])
        return self._reports[length]

    def _by_precision(self, report: FlopsReport) -> dict[Precision, float]:
        gemms = {row.module: row.gemm_precisions for row in self.built.coverage}
        return report.by_precision(gemms, otherwise=Precision(self.recipe.compute_dtype.value))

    def _describe(self, stage: StagePlan, layout: Layout, report: FlopsReport) -> PlannedStage:
        keys = self.keys.blocks
        parts = [self.parameters.block(keys[index], layout) for index in stage.blocks]
        parts += held_ends(self.parameters.ends(layout), is_first=stage.is_first, is_last=stage.is_last).values()
        prefixes = tuple(f"blocks.{index}." for index in stage.blocks)
        rows = [
            row
            for row in report.rows
            if row.module.startswith(prefixes) or (stage.is_last and not row.module.startswith("blocks."))
        ]
        return PlannedStage(
            stage=stage,
            num_parameters=sum(num_parameters(part) for part in parts),
            flops=3 * sum(row.forward for row in rows) * layout.global_batch_size,
            kept_blocks=[index for index in stage.blocks if keys[index].is_kept],
        )


def problems_of(action: Callable[[], object]) -> list[Problem]:
    """Return the problems that ``action`` raises."""
    try:
        action()
    except ConfigError as error:
        return list(error.problems)
    return []


def check(planner: Planner, layout: Layout, *, devices: int) -> None:
    """Raise everything that is wrong with a layout.

    Raises:
        ConfigError: with every problem.
    """
    require(planner.problems(layout, devices=devices))
