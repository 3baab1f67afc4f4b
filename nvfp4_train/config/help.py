"""The help text of the training program, made from the YAML files themselves."""

from pathlib import Path

from nvfp4_train.config.command import FLAGS
from nvfp4_train.config.load import default_choices
from nvfp4_train.config.tree import config_dir, group_choices

INTRODUCTION = """\
Pretrain a hybrid Mamba-Transformer language model in 4-bit NVFP4, on a CPU or on GPUs.

usage: python scripts/pretrain.py [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAG]
       torchrun --nproc-per-node N scripts/pretrain.py [GROUP=CHOICE ...] [KEY=VALUE ...]

Writes runs/<run.name>/: config, checkpoints, metrics, loss curve. The same command again goes on where it stopped.
"""

KEYS = {
    "run.name": "folder of the run below run.dir; the experiment's name by default",
    "run.tokens": "training budget in tokens; schedules end there",
    "run.stop_after_steps": "stop early, with a checkpoint; the schedule does not change",
    "run.seed": "of initialization, data order and stochastic rounding",
    "batch.global_batch_size": "sequences of one step; batch.micro_batch_size of them at a time on one rank",
    "batch.sequence_length": "tokens of one sequence",
    "model.pattern": "one letter a block: M Mamba-2, * attention, - MLP, E experts",
    "model.d_model": "width of the residual stream",
    "recipe.keep_bf16.last_blocks": "trailing blocks that stay in BF16",
    "scheduler.max_lr": "learning rate after warm-up",
    "scheduler.decay_shape": "with scheduler=wsd: linear, cosine, exponential, minus_sqrt",
    "evaluation.interval_steps": "steps between validations",
    "checkpoint.interval_steps": "steps between checkpoints",
    "logging.wandb": "off, offline, online",
    "resume": "auto, never, or the path of a checkpoint",
    "resume_mode": "with a path: continue, or fork (recipe, schedule and data may change)",
}

EXAMPLES = """\
  python scripts/pretrain.py experiment=demo
  python scripts/pretrain.py experiment=demo recipe=bf16 run.name=demo_bf16
  python scripts/pretrain.py experiment=demo scheduler=cosine model.pattern='M-M*-' run.name=short
  python scripts/pretrain.py experiment=demo data=text_files data.paths='[my/text,more/*.jsonl]' run.name=mine
  python scripts/pretrain.py experiment=demo recipe=bf16 --cfg job
"""


def help_text() -> str:
    """Return what the program does, its groups with their choices, the keys used most, flags and examples."""
    defaults = default_choices()
    lines = [INTRODUCTION, "groups and their choices (* by default):"]
    for group, choices in group_choices().items():
        lines.append(f"  {group}")
        lines += [_choice_line(group, choice, mark="*" if defaults.get(group) == choice else " ") for choice in choices]
    lines += ["", "keys used most (--cfg job prints all; comments in configs/ explain each):"]
    lines += [f"  {key:<30} {meaning}" for key, meaning in KEYS.items()]
    lines += ["", "flags:"]
    lines += [f"  {flag:<30} {meaning}" for flag, meaning in FLAGS.items()]
    return "\n".join([*lines, "", "examples:", EXAMPLES]).rstrip()


def _choice_line(group: str, choice: str, *, mark: str) -> str:
    return f"   {mark}{choice:<20} {describe(config_dir() / group / f'{choice}.yaml')}".rstrip()


def describe(path: Path) -> str:
    """Return the first comment line of a YAML file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#") and not line.startswith("# @package")]
    return comments[0].removeprefix("#").strip().rstrip(".:") if comments else ""
