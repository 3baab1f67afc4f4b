import json
import shutil
from pathlib import Path

import pytest

from nvfp4_train.config.model import NormGroup
from nvfp4_train.export.huggingface import load_huggingface, model_config

GOLDEN = Path(__file__).parents[1] / "golden" / "nemotron_h"


def read_config(case):
    return json.loads((GOLDEN / case / "config.json").read_text())


def test_nemotron_h():
    cfg = model_config(read_config("a_groups1_mha"))
    assert cfg.pattern == "M-M*-M-"
    assert cfg.mamba.norm_group is NormGroup.group
    assert (cfg.mamba.dt_min, cfg.mamba.dt_max) == (0.001, float("inf"))
    assert (cfg.d_model, cfg.vocab_size, cfg.mlp.d_ff) == (64, 96, 80)


def test_mamba2():
    cfg = model_config(read_config("m_mamba2"))
    assert cfg.pattern == "MM"
    assert cfg.mamba.norm_group is NormGroup.whole
    assert (cfg.mamba.dt_min, cfg.mamba.dt_max) == (0.0, float("inf"))


def test_pattern_string_wins_over_block_names():
    theirs = read_config("a_groups1_mha") | {"hybrid_override_pattern": "M*"}
    assert model_config(theirs).pattern == "M*"


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("a_groups1_mha", "model_type", "llama"),
        ("a_groups1_mha", "mlp_bias", True),
        ("a_groups1_mha", "mlp_hidden_act", "gelu"),
        ("m_mamba2", "use_bias", True),
    ],
)
def test_what_the_model_does_not_have_is_refused(case, key, value):
    with pytest.raises(ValueError, match=key):
        model_config(read_config(case) | {key: value})


def test_a_folder_that_does_not_fit_its_config_is_refused(tmp_path):
    shutil.copy(GOLDEN / "a_groups1_mha" / "model.safetensors", tmp_path)
    theirs = read_config("a_groups1_mha") | {"hybrid_override_pattern": "M-M*-M"}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(ValueError, match=r"layers\.6"):
        load_huggingface(tmp_path)
