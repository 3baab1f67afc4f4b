"""How a run is spread over ranks, and what a rank trades memory and compile time for."""

from dataclasses import dataclass
from enum import StrEnum

from nvfp4_train.config.pipeline import PipelineSchedule, stages_fault
from nvfp4_train.config.problem import Rule, check, positive


class ActivationCheckpoint(StrEnum):
    """What is kept between forward and backward."""

    none = "none"  # everything that backward needs
    block = "block"  # the input of each block; the rest is recomputed
    selective = "selective"  # results of matrix products; what lies between is recomputed


class Compile(StrEnum):
    """What ``torch.compile`` sees."""

    none = "none"
    block = "block"  # each residual block; its Linears stay as they are


class StageBalance(StrEnum):
    """What a block counts when the blocks are divided into stages."""

    flops = "flops"  # of its products
    time = "time"  # of its sort, measured at the start


class ReduceDtype(StrEnum):
    """Dtype in which partial results of ranks are added up."""

    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Degrees of the mesh axes; their product, without that of `ep`, is the number of ranks.

    Args:
        pp_degree: Ranks that share the blocks of the model, one after the other (pipeline parallelism).
        pipeline_schedule: Order in which they run their microbatches.
        stages_per_rank: Pieces of the model that each of them has.
        stage_balance: By what the blocks are divided into them where the pattern does not say it.
        dp_replicate_degree: Copies of the (sharded) model.
        dp_shard_degree: Ranks over which parameters, gradients and optimizer state are sharded (FSDP2); -1 takes what
            is left.
        cp_degree: Ranks that share the tokens of a sequence (context parallelism).
        tp_degree: Ranks that share the heads and the columns of every layer (tensor parallelism).
        ep_degree: Ranks that share the experts; folded: it divides dp_shard_degree x cp_degree.
        sequence_parallel: Whether the ranks of tp keep a part of the tokens each between layers, where each token is
            computed alone; else all of them keep all.
        tp_reduce_dtype: In which the ranks of tp add up their parts of a layer's result and of its input gradient.
        activation_checkpoint: What is kept between forward and backward.
        compile: What is compiled.
    """

    pp_degree: int
    pipeline_schedule: PipelineSchedule
    stages_per_rank: int
    stage_balance: StageBalance
    dp_replicate_degree: int
    dp_shard_degree: int
    cp_degree: int
    tp_degree: int
    ep_degree: int
    sequence_parallel: bool
    tp_reduce_dtype: ReduceDtype
    activation_checkpoint: ActivationCheckpoint
    compile: Compile

    def __post_init__(self) -> None:
        check(
            self,
            *positive(self, "pp_degree", "dp_replicate_degree", "cp_degree", "tp_degree", "ep_degree"),
            *positive(self, "stages_per_rank"),
            Rule(
                "pipeline_schedule",
                lambda: self.pp_degree > 1 or self.pipeline_schedule is PipelineSchedule["1f1b"],
                "without a pipeline (pp_degree 1) there is nothing to schedule",
                "leave it at 1f1b, or raise pp_degree",
            ),
            Rule(
                "stage_balance",
                lambda: self.pp_degree > 1 or self.stage_balance is StageBalance.flops,
                "without a pipeline (pp_degree 1) there are no stages to balance",
                "leave it at flops, or raise pp_degree",
            ),
            Rule(
                "stages_per_rank",
                lambda: self.stages_per_rank < 1 or not self._stages_fault(),
                self._stages_fault,
                "change stages_per_rank, pipeline_schedule or pp_degree",
            ),
            Rule(
                "dp_shard_degree",
                lambda: self.dp_shard_degree == -1 or self.dp_shard_degree >= 1,
                "must be -1 or at least 1",
                "use -1 to take the ranks that are left",
            ),
            Rule(
                "ep_degree",
                lambda: (
                    min(self.dp_shard_degree, self.ep_degree) < 1
                    or (self.dp_shard_degree * self.cp_degree) % self.ep_degree == 0
                ),
                lambda: f"must divide dp_shard_degree x cp_degree ({self.dp_shard_degree * self.cp_degree})",
                "lower ep_degree, or raise dp_shard_degree",
            ),
            Rule(
                "activation_checkpoint",
                lambda: (
                    self.activation_checkpoint is not ActivationCheckpoint.selective or self.compile is Compile.none
                ),
                "selective checkpointing does not see the operations of a compiled block",
                "use block or none with compile: block, or compile: none",
            ),
        )

    @property
    def num_stages(self) -> int:
        """Pieces that the model is divided into."""
        return self.pp_degree * self.stages_per_rank

    def _stages_fault(self) -> str:
        return stages_fault(self.pipeline_schedule, pp_degree=self.pp_degree, stages_per_rank=self.stages_per_rank)
