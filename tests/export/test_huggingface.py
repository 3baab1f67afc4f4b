import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvfp4_train.config.model import NormGroup
from nvfp4_train.export.huggingface import load_huggingface, load_weights, model_config

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


def test_experts():
    cfg = model_config(read_config("c_moe"))
    assert cfg.pattern == "ME*E"
    assert (cfg.moe.num_experts, cfg.moe.top_k, cfg.moe.num_groups, cfg.moe.top_groups) == (8, 2, 2, 1)
    assert (cfg.moe.d_ff, cfg.moe.shared_d_ff, cfg.moe.d_latent, cfg.moe.routed_scaling) == (16, 48, 0, 2.5)


def test_biases():
    cfg = model_config(read_config("a_groups1_mha") | {"use_bias": True, "mlp_bias": True, "attention_bias": True})
    assert cfg.mamba.proj_bias
    assert cfg.mlp.bias
    assert not cfg.attention.qkv_bias  # transformers 5.18 has none, whatever the key says


def test_what_transformers_leaves_out_has_its_default():
    theirs = read_config("a_groups1_mha")
    for key in ("layer_norm_epsilon", "use_conv_bias", "time_step_min", "n_group"):
        del theirs[key]
    assert model_config(theirs) == model_config(read_config("a_groups1_mha"))


def test_a_missing_key_is_named():
    theirs = read_config("m_mamba2")
    del theirs["state_size"]
    with pytest.raises(ValueError, match="state_size is missing"):
        model_config(theirs)


def test_a_run_time_floor_of_0_leaves_an_initialization():
    assert model_config(read_config("a_groups1_mha") | {"time_step_min": 0.0}).mamba.dt_min == 0.0


def test_shards_are_read_through_their_index(tmp_path):
    whole = load_file(GOLDEN / "a_groups1_mha" / "model.safetensors")
    names = sorted(whole)
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: whole[name] for name in names if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = load_weights(tmp_path)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in names)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_weights(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_huggingface(tmp_path)
    shutil.copy(GOLDEN / "a_groups1_mha" / "config.json", tmp_path)
    with pytest.raises(ValueError, match="neither"):
        load_huggingface(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ValueError, match="not a readable"):
        load_huggingface(tmp_path)


def test_pattern_string_wins_over_block_names():
    theirs = read_config("a_groups1_mha") | {"hybrid_override_pattern": "M*"}
    assert model_config(theirs).pattern == "M*"


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("a_groups1_mha", "model_type", "llama"),
        ("a_groups1_mha", "mlp_hidden_act", "silu"),
        ("a_groups1_mha", "mamba_hidden_act", "gelu"),
        ("a_groups1_mha", "layers_block_type", ["mamba", "rotor"]),
        ("c_moe", "mlp_bias", True),
        ("m_mamba2", "hidden_act", "gelu"),
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
