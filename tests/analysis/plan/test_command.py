"""The command line: flags, overrides, and every mistake at once."""

import json
from pathlib import Path

import pytest

from nvfp4_train.analysis.plan.command import run_command
from nvfp4_train.config.problem import ConfigError

DEMO = ("experiment=demo", "batch.micro_batch_size=1", "batch.global_batch_size=16")


def run(*arguments: str) -> tuple[int, str]:
    said: list[str] = []
    code = run_command(list(arguments), say=said.append)
    return code, "\n".join(said)


def keys(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        run(*arguments)
    return [problem.key for problem in error.value.problems]


def test_times_that_only_a_run_measures_are_told():
    balanced = ("parallel.pp_degree=2", "parallel.stage_balance=time", "batch.global_batch_size=32")
    code, said = run("experiment=demo", *balanced, "--devices", "2", "--hardware", "H100")
    assert code == 0
    assert "here stages are divided by FLOPs" in said


def test_a_plan_of_the_configured_layout_at_a_price():
    code, text = run(*DEMO, "--devices", "8", "--hardware", "H100", "--price", "0")
    assert code == 0
    assert " 0 USD at 0.0 USD" in text
    assert "8 x H100: dp_shard 8" in text
    assert "activations by parallel.activation_checkpoint: none" in text


def test_a_layout_that_does_not_fill_the_devices_is_filled_along_dp_shard():
    _, text = run(*DEMO, "parallel.dp_shard_degree=2", "parallel.cp_degree=2", "--devices", "16", "--hardware", "H100")
    assert "16 x H100: dp_shard 8, cp 2" in text


def test_a_search_plans_the_best(tmp_path: Path):
    file = tmp_path / "plan.json"
    code, text = run(*DEMO, "--devices", "8", "--hardware", "h200", "--search", "--json", str(file))
    assert code == 0
    assert text.index("Best layouts") < text.index("Stages")
    values = json.loads(file.read_text())
    assert values["search"]["layouts"][0]["tp"] == values["plan"]["layout"]["tp"]


def test_what_does_not_fit_is_code_1():
    code, text = run("experiment=paper_12b_nvfp4", "--devices", "1", "--hardware", "H100")
    assert code == 1
    assert "DOES NOT FIT" in text


def test_all_mistakes_of_flags_and_configuration_at_once():
    assert keys("experiment=demo", "model.d_modell=3", "--price", "-1") == [
        "--devices",
        "--hardware",
        "--price",
        "model.d_modell",
    ]
    assert keys("experiment=demo", "batch.sequence_length=0", "--devices", "0", "--hardware", "H1") == [
        "--devices",
        "--hardware",
        "batch.sequence_length",
    ]
    assert keys(*DEMO, "recipe.keep_bf16.modules=[x]", "--devices", "32", "--hardware", "X") == [
        "--hardware",
        "recipe.keep_bf16.modules",
        "batch.global_batch_size",
    ]


def test_what_is_no_number_and_no_file_comes_with_the_others(tmp_path: Path):
    where = str(tmp_path / "nowhere" / "plan.json")
    flags = ("--devices", "many", "--hardware", "B1", "--price", "nan", "--json", where)
    assert keys("model.d_modell=3", *flags) == ["--devices", "--price", "--json", "--hardware", "model.d_modell"]
    assert keys(*DEMO, "--devices", "1", "--hardware", "H100", "--json", str(tmp_path)) == ["--json"]


def test_the_calibration_reads_nothing_else():
    assert keys("--calibration", "--devices", "8", "model=demo") == ["--devices", "model=demo"]


def test_deepspeed_is_planned():
    zero = ("engine=deepspeed", "engine.zero_stage=3", "engine.offload_optimizer=cpu")
    code, text = run(*DEMO, *zero, "--devices", "8", "--hardware", "H100")
    assert code == 0
    assert "8 x H100: dp_shard 8" in text
    assert "ZeRO 3 optimizer offloaded" in text
    assert "in the host's memory" in text


def test_all_mistakes_of_a_layout_at_once():
    found = keys(*DEMO, "parallel.tp_degree=16", "parallel.cp_degree=3", "--devices", "48", "--hardware", "H100")
    assert {"batch.sequence_length", "model.attention.num_kv_heads", "model.mamba.num_groups"} <= set(found)


def test_devices_that_cannot_be_filled():
    assert keys(*DEMO, "parallel.cp_degree=2", "--devices", "7", "--hardware", "H100") == ["--devices"]
    assert keys(*DEMO, "--devices", "32", "--hardware", "H100") == ["batch.global_batch_size"]


def test_unknown_flags_are_named():
    assert keys("--device", "8") == ["--device"]


def test_a_search_reports_mistakes_of_the_recipe():
    found = keys(*DEMO, "recipe.keep_bf16.modules=[x]", "--devices", "8", "--hardware", "H100", "--search")
    assert found == ["recipe.keep_bf16.modules"]


def test_the_calibration_is_printed():
    code, text = run("--calibration")
    assert code == 0
    assert "llama3_405b" in text


def test_a_file_that_cannot_be_written_and_hardware_without_a_name_are_told():
    flags = ("experiment=tiny", "--devices", "1", "--hardware")
    with pytest.raises(ConfigError, match="hardware"):
        run(*flags, "")
    with pytest.raises(ConfigError, match="--json"):
        run(*flags, "H100", "--json", "/dev/full")
