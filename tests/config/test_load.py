import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nvfp4_train
from nvfp4_train.config.load import default_choices, from_yaml, load_config, load_yaml, to_yaml
from nvfp4_train.config.problem import report
from nvfp4_train.config.run import Device
from nvfp4_train.config.tree import config_dir
from tests.support.configs import composed, load_problems, problems_of

FOUR_MISTAKES = {
    "model.d_modle": "5",
    "scheduler.decay_shape": "zigzag",
    "model.pattern": "M-X*",
    "model.d_model": "250",
}


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A copy of the YAML tree that a test may change."""
    shutil.copytree(config_dir(), tmp_path / "configs")
    monkeypatch.setattr(nvfp4_train, "__file__", str(tmp_path / "nvfp4_train" / "__init__.py"))
    return tmp_path / "configs"


def test_what_is_loaded():
    overrides = ["experiment=demo", "run.seed=7", "run.device=cpu"]
    loaded = load_config(overrides)
    assert (loaded.cfg.run.name, loaded.experiment, loaded.overrides) == ("demo", "demo", overrides)
    assert (loaded.cfg.run.seed, loaded.cfg.run.device) == (7, Device.cpu)
    assert load_yaml(loaded.yaml)["run"]["seed"] == 7


def test_without_an_experiment_the_run_is_called_run():
    loaded = load_config([])
    assert (loaded.cfg.run.name, loaded.experiment) == ("run", None)
    assert load_config(["experiment=null", "run.name=mine"]).cfg.run.name == "mine"


def test_the_working_directory_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config([]).cfg == composed()


def test_infinity_survives_a_round_trip():
    loaded = load_config([])
    assert loaded.cfg.model.mamba.dt_max == float("inf")
    assert from_yaml(loaded.yaml) == loaded.cfg
    assert to_yaml(from_yaml(loaded.yaml)) == loaded.yaml


def test_loading_needs_no_torch():
    program = (
        "import sys; from nvfp4_train.config.load import load_config; load_config([]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_the_command_line_wins_over_the_experiment_and_the_experiment_over_the_root():
    cfg = composed("experiment=tiny", "batch.sequence_length=128")
    assert cfg.batch.sequence_length == 128
    assert cfg.batch.global_batch_size == 8
    assert composed("experiment=tiny", "model=demo").model == composed().model


def test_interpolations_reach_across_the_tree():
    assert composed("model.mlp.d_ff=${model.d_model}").model.mlp.d_ff == 256


def test_the_last_of_two_overrides_wins():
    assert composed("run.seed=1", "run.seed=2", "recipe=fp32", "recipe=bf16").recipe.name == "bf16"
    assert composed("run.seed=1", "run.seed=2").run.seed == 2


def test_default_choices():
    assert default_choices()["recipe"] == "nvfp4"
    assert default_choices()["experiment"] is None


def test_four_mistakes_on_the_command_line_are_reported_together():
    problems = load_problems("experiment=demo", *(f"{key}={value}" for key, value in FOUR_MISTAKES.items()))
    assert set(problems) == set(FOUR_MISTAKES)
    assert problems["model.d_modle"].fix == "did you mean model.d_model?"
    assert "linear, cosine, exponential, minus_sqrt" in problems["scheduler.decay_shape"].rule
    assert "'X' at position 2" in problems["model.pattern"].rule
    assert "multiples of 16" in problems["model.d_model"].rule
    text = report(list(problems.values()))
    assert all(f"{key} = {value}" in text for key, value in FOUR_MISTAKES.items())


def test_four_mistakes_in_a_yaml_file_are_reported_together(tree):
    lines = ["# @package _global_", "defaults:", "  - demo", "  - _self_", "model:"]
    lines += [f"  {key.removeprefix('model.')}: {value}" for key, value in FOUR_MISTAKES.items() if "model" in key]
    lines += ["scheduler:", "  decay_shape: zigzag"]
    (tree / "experiment" / "wrong.yaml").write_text("\n".join(lines), encoding="utf-8")
    assert set(load_problems("experiment=wrong")) == set(FOUR_MISTAKES)


# What the user wrote: the key that is reported, and words of the rule and of the fix.
WRONG = {
    "foo": ("foo", "key=value", "write key=value"),
    "=3": ("=3", "no key", "write key=value"),
    "-x=3": ("-x=3", "key=value", "write key=value"),
    "run.dir=a,b": ("run.dir=a,b", "one value", "write key=value"),
    "recipe@a=bf16": ("recipe@a=bf16", "package", "write key=value"),
    "+x=1": ("+x=1", "neither added nor removed", "groups and keys: run, batch"),
    "+experiment=demo": ("+experiment=demo", "neither added nor removed", "experiment=demo"),
    "++run.seed=1": ("++run.seed=1", "neither added nor removed", "run.seed=1"),
    "~recipe": ("~recipe", "neither added nor removed", "recipe=VALUE"),
    "modl.d_model=256": ("modl.d_model", "unknown key", "did you mean model.d_model?"),
    "model.mamba.num_head=3": ("model.mamba.num_head", "unknown key", "did you mean model.mamba.num_heads?"),
    "lr=1": ("lr", "unknown key", "did you mean scheduler.max_lr"),
    "hydra.run.dir=x": ("hydra.run.dir", "unknown key", "did you mean run.dir?"),
    "hydra/launcher=x": ("hydra/launcher", "unknown key", "groups and keys"),
    "model.d_model.x=3": ("model.d_model.x", "unknown key", "did you mean model.d_model?"),
    "model.attention={num_head: 3}": ("model.attention.num_head", "unknown key", "num_heads?"),
    "batch.ramp=3": ("batch.ramp", "group of keys", "batch.ramp.KEY=VALUE"),
    "parallel=dfault": ("parallel", "configs/parallel", "did you mean default?"),
    "logging=null": ("logging", "configs/logging", "choices: default"),
    "optimizer=sgd": ("optimizer", "configs/optimizer", "choices: adamw"),
    "run.seed=abc": ("run.seed", "whole number", "run.seed=16"),
    "run.tokens=null": ("run.tokens", "whole number", "run.tokens=16"),
    "run.device=cud": ("run.device", "one of auto, cpu, cuda", "did you mean cuda?"),
    "scheduler.max_lr=???": ("scheduler.max_lr", "needs a value", "scheduler.max_lr=..."),
    "data=text_files": ("data.paths", "needs a value", "data.paths=..."),
    "model.norm_eps='${nope}'": ("model.norm_eps", "not found", "a key that exists"),
    "run.name=a/b": ("run.name", "folder name", "run.name=my_run"),
    "recipe.keep_bf16.modules={}": ("recipe.keep_bf16.modules", "list of texts", "='[a,b]'"),
    "recipe.gemm={1: 2}": ("recipe.gemm", "one of auto", "choices: auto"),
    "zoo={1: 2}": ("zoo.1", "unknown key", "groups and keys"),
    "resume='${.nope}'": ("resume", "not found", "a key that exists"),
}


def test_every_wrong_override_is_reported_once_with_its_rule_and_fix():
    problems = problems_of(lambda: load_config(["experiment=tiny", *WRONG]))
    assert sorted(problem.key for problem in problems) == sorted(key for key, _, _ in WRONG.values())
    found = {problem.key: problem for problem in problems}
    for key, rule, fix in WRONG.values():
        assert rule in found[key].rule, key
        assert fix in found[key].fix, key


def test_a_choice_that_does_not_exist_hides_nothing_else():
    problems = load_problems("recipe=nvfp5", "optimizer=sgd", "model.d_model=250", "run.tokens=0", "foo")
    assert {"recipe", "optimizer", "model.d_model", "run.tokens", "foo"} <= set(problems)


def test_an_experiment_file_needs_its_package_line(tree):
    (tree / "experiment" / "mine.yaml").write_text("run:\n  seed: 3\n", encoding="utf-8")
    assert list(load_problems("experiment=mine")) == ["experiment"]
    assert "# @package _global_" in load_problems("experiment=mine")["experiment"].fix


@pytest.mark.parametrize("text", ["a: [1", "defaults:\n  - nope\n", "defaults:\n  - override /recipe: nope\n"])
def test_files_that_do_not_compose_are_a_problem_among_others(tree, text):
    (tree / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
    assert set(load_problems("experiment=mine", "foo")) == {"foo", str(tree)}


def test_an_unquoted_off_is_off(tree):
    text = "# @package _global_\nlogging:\n  wandb: off\n"
    (tree / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
    assert load_config(["experiment=mine"]).cfg.logging.wandb.value == "off"


def test_an_experiment_in_a_folder_names_a_run_without_a_slash(tree):
    (tree / "experiment" / "paper").mkdir()
    (tree / "experiment" / "paper" / "a.yaml").write_text("# @package _global_\nrun:\n  seed: 3\n", encoding="utf-8")
    loaded = load_config(["experiment=paper/a"])
    assert (loaded.cfg.run.name, loaded.cfg.run.seed) == ("paper_a", 3)
