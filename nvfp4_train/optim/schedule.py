"""Learning rate, weight decay and batch size as pure functions of the tokens seen.

A resumed run needs no schedule state, and a longer run shares its beginning with a shorter one wherever the schedule
does.

Source: the formulas and the order of operations are those of Megatron-Core 0.16 (`OptimizerParamScheduler`,
`RampupBatchsizeNumMicroBatchesCalculator`); there the unit is samples.
"""

import math

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.optimizer import OptimizerConfig, WeightDecayShape
from nvfp4_train.config.scheduler import (
    ConstantConfig,
    CosineConfig,
    DecayingSchedulerConfig,
    DecayShape,
    InverseSqrtConfig,
    LinearConfig,
    SchedulerConfig,
    WsdConfig,
)


def learning_rate(cfg: SchedulerConfig, *, tokens: int, total_tokens: int) -> float:
    """Return the learning rate of the step that starts after `tokens` tokens.

    Args:
        cfg: The schedule.
        tokens: Tokens seen before the step.
        total_tokens: Token at which the schedule ends; beyond it the rate stays at `min_lr` (a constant schedule:
            `max_lr`).
    """
    if cfg.warmup_tokens and tokens <= cfg.warmup_tokens:
        return cfg.warmup_init_lr + (cfg.max_lr - cfg.warmup_init_lr) * float(tokens) / float(cfg.warmup_tokens)
    if isinstance(cfg, ConstantConfig):
        return cfg.max_lr
    assert isinstance(cfg, DecayingSchedulerConfig)
    if tokens > total_tokens:
        return cfg.min_lr
    if isinstance(cfg, InverseSqrtConfig):
        warmup = max(cfg.warmup_tokens, 1)
        return max(cfg.min_lr, cfg.max_lr * warmup**0.5 / max(tokens, 1) ** 0.5)
    return cfg.min_lr + _decay_coefficient(cfg, tokens=tokens, total_tokens=total_tokens) * (cfg.max_lr - cfg.min_lr)


def weight_decay(cfg: OptimizerConfig, *, tokens: int, total_tokens: int) -> float:
    """Return the weight decay of the step that starts after `tokens` tokens; its last value from `total_tokens` on."""
    start, end, shape = cfg.weight_decay_start, cfg.weight_decay, cfg.weight_decay_shape
    if shape is WeightDecayShape.constant or tokens > total_tokens:
        return end
    progress = float(tokens) / float(total_tokens)
    coefficient = progress if shape is WeightDecayShape.linear else 0.5 * (math.cos(math.pi * (1 - progress)) + 1.0)
    return start + coefficient * (end - start)


def global_batch_size(cfg: BatchConfig, *, tokens: int) -> int:
    """Return the sequences of the step that starts after `tokens` tokens.

    During ramp-up the size grows by `ramp.increment` at equal token intervals, from `ramp.start` at token 0 to
    `global_batch_size` at `ramp.tokens`.
    """
    if tokens >= cfg.ramp.tokens:
        return cfg.global_batch_size
    num_increments = (cfg.global_batch_size - cfg.ramp.start) // cfg.ramp.increment
    # Integers, because the float quotient of Megatron may fall one ulp short of a boundary.
    return cfg.ramp.start + tokens * num_increments // cfg.ramp.tokens * cfg.ramp.increment


def _decay_coefficient(cfg: SchedulerConfig, *, tokens: int, total_tokens: int) -> float:
    """Return where the rate stands between `min_lr` (0) and `max_lr` (1), after warm-up."""
    match cfg:
        case WsdConfig():
            decay_tokens = cfg.decay_fraction * total_tokens
            if tokens <= total_tokens - decay_tokens:
                return 1.0
            return _wsd_coefficient(cfg.decay_shape, (tokens - (total_tokens - decay_tokens)) / decay_tokens)
        case LinearConfig():
            return 1.0 - _progress(cfg, tokens=tokens, total_tokens=total_tokens)
        case CosineConfig():
            return 0.5 * (math.cos(math.pi * _progress(cfg, tokens=tokens, total_tokens=total_tokens)) + 1.0)
    raise AssertionError(f"no schedule for {type(cfg).__name__}")


def _progress(cfg: SchedulerConfig, *, tokens: int, total_tokens: int) -> float:
    """Return the fraction of the time between the end of warm-up and the end that has passed."""
    if total_tokens <= cfg.warmup_tokens:
        return 1.0
    return float(tokens - cfg.warmup_tokens) / float(total_tokens - cfg.warmup_tokens)


def _wsd_coefficient(shape: DecayShape, progress: float) -> float:
    match shape:
        case DecayShape.linear:
            return 1.0 - progress
        case DecayShape.cosine:
            return 0.5 * (math.cos(math.pi * progress) + 1.0)
        case DecayShape.exponential:
            return 2.0 * 0.5**progress - 1.0
        case DecayShape.minus_sqrt:
            return 1.0 - math.sqrt(progress)
