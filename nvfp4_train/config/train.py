"""The root of a run's configuration, and every check that needs two groups."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.blend import coverage_problems
from nvfp4_train.config.checkpoint import CheckpointConfig
from nvfp4_train.config.data import DataConfig, TextDataConfig
from nvfp4_train.config.engine import EngineConfig
from nvfp4_train.config.evaluation import EvaluationConfig
from nvfp4_train.config.indexed_data import IndexedDataConfig
from nvfp4_train.config.logging import LoggingConfig
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.optimizer import OptimizerConfig
from nvfp4_train.config.parallel import ParallelConfig
from nvfp4_train.config.pipeline import pipeline_problems
from nvfp4_train.config.problem import Problem, Rule, findings, require, violations
from nvfp4_train.config.recipe import RecipeConfig
from nvfp4_train.config.run import RunConfig
from nvfp4_train.config.scheduler import SchedulerConfig, WsdConfig
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
        Rule("resume", lambda: bool(cfg.resume), "must be auto, never or a path", "resume=auto"),
    ]
    rules += [*_data_rank_rules(cfg), *(_width_rule(cfg, width) for width in WIDTHS), _tokens_rule(cfg)]
    return [*violations(cfg, *rules), *findings(cfg, _phase_problems, _token_id_problems, pipeline_problems)]


def _tokenizer_vocab_size(data: DataConfig) -> int:
    return data.tokenizer_vocab_size if isinstance(data, TextDataConfig) else 0


def _phase_problems(cfg: TrainConfig) -> list[Problem]:
    """The phases of the data are parts of the whole run."""
    data = cfg.data
    if not isinstance(data, IndexedDataConfig):
        return []
    found = coverage_problems(data.sources, data.phases, run_tokens=cfg.run.tokens)
    return [problem.below("data") for problem in found]


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


def _width_rule(cfg: TrainConfig, width: Width) -> Rule:
    return Rule(
        width.key,
        lambda: width.value(cfg.model) % _dim_multiple(cfg.recipe) == 0 or not _is_quantized(cfg, width),
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


def _token_multiple(recipe: RecipeConfig) -> int:
    sizes = [getattr(spec, "hadamard_size", 0) for spec in recipe.linear.operands.values()]
    return max(_dim_multiple(recipe), *sizes)


def _is_quantized(cfg: TrainConfig, width: Width) -> bool:
    names = quantized_linears(cfg.model, cfg.recipe.keep_bf16)
    return any(fnmatchcase(name, glob) for name in names for glob in width.linears)
