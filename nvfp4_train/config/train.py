"""The root of a run's configuration, and every check that needs two groups."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from fnmatch import fnmatchcase

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.blend import coverage_problems
from nvfp4_train.config.checkpoint import CheckpointConfig
from nvfp4_train.config.data import DataConfig, TextDataConfig
from nvfp4_train.config.degrees import degree_rules
from nvfp4_train.config.engine import DeepSpeedEngineConfig, EngineConfig, TorchEngineConfig, WeightGather
from nvfp4_train.config.evaluation import EvaluationConfig
from nvfp4_train.config.indexed_data import IndexedDataConfig
from nvfp4_train.config.logging import LoggingConfig
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.optimizer import AdamWConfig, OptimizerConfig, StateDtype, StateOffload
from nvfp4_train.config.parallel import Compile, ParallelConfig
from nvfp4_train.config.pipeline import pipeline_problems
from nvfp4_train.config.problem import Problem, Rule, findings, is_complete, require, violations
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.config.run import RunConfig
from nvfp4_train.config.scheduler import SchedulerConfig, WsdConfig
from nvfp4_train.config.shares import share_problems
from nvfp4_train.config.widths import WIDTHS, Width, quantized_linears
from nvfp4_train.numerics.spec import DIM_MULTIPLE, HIGH_PRECISION_FORMATS

# What a run that starts from another checkpoint may change. The functional form, because `continue` is a keyword.
ResumeMode = StrEnum("ResumeMode", {"continue": "continue", "fork": "fork"})


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """A run, completely.

    Args:
        resume: ``auto`` (from the newest checkpoint of the run's own folder, if there is one), ``never``, or the path
            of a checkpoint.
        resume_mode: With a path: ``continue`` keeps all that shapes state and data order, ``fork`` may change it.
    """

    run: RunConfig
    batch: BatchConfig
    model: ModelConfig
    recipe: RecipeConfig
    data: DataConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    engine: EngineConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    resume: str
    resume_mode: ResumeMode

    def __post_init__(self) -> None:
        require(cross_group_problems(self))


def cross_group_problems(cfg: TrainConfig) -> list[Problem]:
    """Return every violated rule that needs values of two groups."""
    rules = [
        Rule(
            "model.vocab_size",
            lambda: cfg.model.vocab_size >= _tokenizer_vocab_size(cfg.data),
            lambda: f"must hold every token: at least data.tokenizer_vocab_size ({_tokenizer_vocab_size(cfg.data)})",
            "raise model.vocab_size or lower data.tokenizer_vocab_size",
        ),
        Rule(
            "scheduler.warmup_tokens",
            lambda: cfg.scheduler.warmup_tokens < cfg.run.tokens,
            lambda: f"warm-up must end before the run does (run.tokens is {cfg.run.tokens})",
            "lower scheduler.warmup_tokens; for a short trial use run.stop_after_steps, which keeps the schedule",
        ),
        Rule(
            "scheduler.decay_fraction",
            lambda: not isinstance(cfg.scheduler, WsdConfig) or _decay_fits(cfg.scheduler, tokens=cfg.run.tokens),
            lambda: (
                f"warm-up ({cfg.scheduler.warmup_tokens} tokens) and decay must fit in run.tokens ({cfg.run.tokens})"
            ),
            "lower scheduler.decay_fraction or scheduler.warmup_tokens",
        ),
        Rule(
            "resume_mode",
            lambda: cfg.resume_mode is not ResumeMode.fork or cfg.resume not in ("auto", "never"),
            lambda: f"a fork starts from the checkpoint that resume names, and resume is {cfg.resume}",
            "resume=runs/NAME/checkpoints/step_...",
        ),
        Rule(
            "engine.weight_gather",
            lambda: not _gathers_quantized(cfg.engine) or cfg.recipe.linear.weight_gather_problem is None,
            lambda: f"under recipe {cfg.recipe.name} no weight can be: {cfg.recipe.linear.weight_gather_problem}",
            "engine.weight_gather=bf16, or a recipe whose weights have square tiles, such as nvfp4",
        ),
        Rule("resume", lambda: bool(cfg.resume), "must be auto, never or a path", "resume=auto"),
    ]
    rules += [*_data_rank_rules(cfg), *_width_rules(cfg), _tokens_rule(cfg), *_deepspeed_rules(cfg)]
    rules += degree_rules(cfg)
    return [
        *violations(cfg, *rules),
        *findings(cfg, _phase_problems, _token_id_problems, _share_problems, _deepspeed_problems, pipeline_problems),
    ]


def _gathers_quantized(engine: EngineConfig) -> bool:
    return isinstance(engine, TorchEngineConfig) and engine.weight_gather is WeightGather.quantized


def _tokenizer_vocab_size(data: DataConfig) -> int:
    return data.tokenizer_vocab_size if isinstance(data, TextDataConfig) else 0


def _phase_problems(cfg: TrainConfig) -> list[Problem]:
    """The phases of the data are parts of the whole run."""
    data = cfg.data
    if not isinstance(data, IndexedDataConfig):
        return []
    found = coverage_problems(data.sources, data.phases, run_tokens=cfg.run.tokens)
    return [problem.below("data") for problem in found]


def _share_problems(cfg: TrainConfig) -> list[Problem]:
    return share_problems(cfg.model, cfg.parallel, batch=cfg.batch, recipe=cfg.recipe)


def _token_id_problems(cfg: TrainConfig) -> list[Problem]:
    """Tokens that the data configuration names are tokens of the model."""
    data, size = cfg.data, cfg.model.vocab_size
    if not isinstance(data, IndexedDataConfig):
        return []
    ids = {
        "data.pad_token": data.pad_token,
        "data.fim.prefix_token": data.fim.prefix_token,
        "data.fim.middle_token": data.fim.middle_token,
        "data.fim.suffix_token": data.fim.suffix_token,
    }
    rule, fix = f"must be below model.vocab_size ({size})", "correct the id, or raise model.vocab_size"
    return [
        Problem(key=key, value=token, rule=rule, fix=fix)
        for key, token in ids.items()
        if token is not None and token >= size
    ]


def _decay_fits(scheduler: WsdConfig, *, tokens: int) -> bool:
    return scheduler.warmup_tokens + scheduler.decay_fraction * tokens <= tokens


def _data_rank_rules(cfg: TrainConfig) -> list[Rule]:
    """Each data rank, as far as the config says how many there are, gets whole microbatches at every batch size.

    Where it says one, the batch's own rules say all.
    """

    def smallest_step() -> int:
        ranks = cfg.parallel.dp_replicate_degree * max(cfg.parallel.dp_shard_degree, 1)
        return max(cfg.batch.micro_batch_size * ranks, 1) if ranks > 1 else 1

    def rule(key: str, *, holds: Callable[[], bool]) -> Rule:
        return Rule(
            key,
            holds,
            lambda: f"must be a multiple of micro_batch_size times the data ranks ({smallest_step()})",
            "change it, batch.micro_batch_size or the degrees of parallel",
        )

    def ramp(size: int) -> int:
        return size if cfg.batch.ramp.tokens else 0

    return [
        rule("batch.global_batch_size", holds=lambda: cfg.batch.global_batch_size % smallest_step() == 0),
        rule("batch.ramp.start", holds=lambda: ramp(cfg.batch.ramp.start) % smallest_step() == 0),
        rule("batch.ramp.increment", holds=lambda: ramp(cfg.batch.ramp.increment) % smallest_step() == 0),
    ]


def _width_rules(cfg: TrainConfig) -> list[Rule]:
    return [
        *(_width_rule(cfg, width) for width in WIDTHS),
        *(_local_width_rule(cfg, width) for width in WIDTHS if width.is_split),
    ]


def _is_exempt(cfg: TrainConfig, width: Width) -> bool:
    return not _is_quantized(cfg, width) or width.is_filled_up(cfg.model, multiple=_dim_multiple(cfg.recipe))


def _local_width_rule(cfg: TrainConfig, width: Width) -> Rule:
    """What a rank of tp holds is whole blocks; that all ranks hold the same is another rule."""

    def local() -> int:
        return width.value(cfg.model) // cfg.parallel.tp_degree

    def holds() -> bool:
        degree = cfg.parallel.tp_degree
        if degree <= 1 or not width.divides_among(cfg.model, ranks=degree):
            return True
        return local() % _shard_multiple(cfg.recipe) == 0 or _is_exempt(cfg, width)

    return Rule(
        width.key,
        holds,
        lambda: (
            f"with parallel.tp_degree {cfg.parallel.tp_degree} a rank holds {local()} ({width.meaning}),"
            f" and recipe {cfg.recipe.name} needs multiples of {_shard_multiple(cfg.recipe)}, so that no block is cut"
        ),
        "lower parallel.tp_degree, change the width, or keep the Linears that have it in BF16 (recipe.keep_bf16)",
    )


def _deepspeed_rules(cfg: TrainConfig) -> list[Rule]:
    """DeepSpeed shards over all ranks itself, and hangs its hooks into the model that it is given."""

    def other_engine() -> bool:
        return not isinstance(cfg.engine, DeepSpeedEngineConfig)

    def only_one(degree: str) -> Rule:
        return Rule(
            f"parallel.{degree}",
            lambda: other_engine() or getattr(cfg.parallel, degree) == 1,
            "must be 1 with engine=deepspeed: ZeRO shards over all ranks",
            f"parallel.{degree}=1, or engine=torch",
        )

    degrees = [field.name for field in fields(ParallelConfig) if field.name.endswith("_degree")]
    return [
        *(only_one(degree) for degree in degrees if degree != "dp_shard_degree"),
        Rule(
            "parallel.compile",
            lambda: other_engine() or cfg.parallel.compile is Compile.none,
            "must be none with engine=deepspeed: the hooks of ZeRO would break every graph",
            "parallel.compile=none, or engine=torch",
        ),
        Rule(
            "optimizer.state_dtype",
            lambda: other_engine() or getattr(cfg.optimizer, "state_dtype", None) is StateDtype.fp32,
            "must be fp32 with engine=deepspeed: ZeRO keeps the moments itself",
            "optimizer.state_dtype=fp32, or engine=torch",
        ),
        Rule(
            "optimizer.state_offload",
            lambda: other_engine() or getattr(cfg.optimizer, "state_offload", None) is StateOffload.none,
            "must be none with engine=deepspeed, which has an option of its own",
            "engine.offload_optimizer=cpu with optimizer.state_offload=none",
        ),
    ]


def _deepspeed_problems(cfg: TrainConfig) -> list[Problem]:
    if not isinstance(cfg.engine, DeepSpeedEngineConfig) or isinstance(cfg.optimizer, AdamWConfig):
        return []
    return [
        Problem(
            key="optimizer",
            value="muon",
            rule="must be adamw with engine=deepspeed: ZeRO flattens the matrices that others work on",
            fix="optimizer=adamw, or engine=torch",
        )
    ]


def _width_rule(cfg: TrainConfig, width: Width) -> Rule:
    return Rule(
        width.key,
        lambda: width.value(cfg.model) % _dim_multiple(cfg.recipe) == 0 or _is_exempt(cfg, width),
        lambda: (
            f"recipe {cfg.recipe.name} needs multiples of {_dim_multiple(cfg.recipe)};"
            f" this makes {width.value(cfg.model)} ({width.meaning})"
        ),
        "change the width, or keep the Linears that have it in BF16 (recipe.keep_bf16)",
    )


def _tokens_rule(cfg: TrainConfig) -> Rule:
    def tokens() -> int:
        return cfg.batch.micro_batch_size * cfg.batch.sequence_length

    return Rule(
        "batch.sequence_length",
        lambda: tokens() % _token_multiple(cfg.recipe) == 0,
        lambda: (
            f"recipe {cfg.recipe.name} needs multiples of {_token_multiple(cfg.recipe)} tokens in a microbatch;"
            f" this makes {tokens()} (micro_batch_size * sequence_length)"
        ),
        "change batch.sequence_length or batch.micro_batch_size",
    )


def _dim_multiple(recipe: RecipeConfig) -> int:
    """Return what the operands whose format is known ask of every dim of a GEMM."""
    formats = [spec.format for spec in recipe.linear.operands.values() if hasattr(spec, "format")]
    return max((1 if format in HIGH_PRECISION_FORMATS else DIM_MULTIPLE for format in formats), default=1)


def _shard_multiple(recipe: RecipeConfig) -> int:
    """Return `LinearRecipe.shard_multiple`, as far as the operands are known."""
    lengths = [spec.block_length for spec in recipe.linear.operands.values() if is_complete(spec)]
    return max(_dim_multiple(recipe), *lengths, 1)


def _token_multiple(recipe: RecipeConfig) -> int:
    sizes = [getattr(spec, "hadamard_size", 0) for spec in recipe.linear.operands.values()]
    return max(_dim_multiple(recipe), *sizes)


def _is_quantized(cfg: TrainConfig, width: Width) -> bool:
    names = quantized_linears(cfg.model, cfg.recipe.keep_bf16)
    return any(fnmatchcase(name, glob) for name in names for glob in width.linears)
