from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.model import Position
from nvfp4_train.config.moe import Activation, RouterScore
from nvfp4_train.export.names import export_state, import_state, name_table
from nvfp4_train.model.hybrid import build_model
from tests.support.models import TINY_ATTENTION, TINY_MAMBA, TINY_MLP, TINY_MOE, tiny_model


def numbered_state(cfg):
    """Give every element of the model its own value, so that no two layouts look alike."""
    state, start = {}, 0
    for name, tensor in build_model(cfg).state_dict().items():
        state[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float64).view(tensor.shape)
        start += tensor.numel()
    return state


@pytest.mark.parametrize(
    "cfg",
    [
        tiny_model(),
        tiny_model(mamba=replace(TINY_MAMBA, num_groups=1, conv_bias=False)),
        tiny_model(mamba=replace(TINY_MAMBA, num_groups=4)),
        tiny_model(attention=replace(TINY_ATTENTION, num_kv_heads=4)),
        tiny_model(attention=replace(TINY_ATTENTION, num_kv_heads=1), tie_embeddings=True),
        tiny_model(mamba=replace(TINY_MAMBA, proj_bias=True), mlp=replace(TINY_MLP, bias=True)),
        tiny_model(pattern="ME|*E", moe=replace(TINY_MOE, d_latent=16)),
        tiny_model(pattern="E", moe=replace(TINY_MOE, shared_d_ff=0, activation=Activation.gelu)),
    ],
    ids=["groups 2", "groups 1, no bias", "groups 4", "MHA", "MQA, tied", "biases", "latent experts", "no shared"],
)
def test_round_trip_keeps_every_value(cfg):
    state = numbered_state(cfg)
    exported = export_state(state, cfg)
    back = import_state(exported, cfg)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert sum(t.numel() for t in exported.values()) == sum(t.numel() for t in state.values())
    again = export_state(back, cfg)
    assert all(torch.equal(again[name], exported[name]) for name in exported)


def test_in_proj_rows_go_from_groups_to_parts():
    # 2 groups of 2 heads x 16: z 32, x 32, B 16, C 16, dt 2 rows in each group
    state = numbered_state(tiny_model())
    (ours,) = (t for name, t in state.items() if name == "blocks.0.mixer.in_proj.weight")
    theirs = export_state(state, tiny_model())["backbone.layers.0.mixer.in_proj.weight"]
    first, second = ours.chunk(2)
    z, x, b, c, dt = (
        torch.cat(pair)
        for pair in zip(first.split((32, 32, 16, 16, 2)), second.split((32, 32, 16, 16, 2)), strict=True)
    )
    assert torch.equal(theirs, torch.cat((z, x, b, c, dt)))


def test_convolution_channels_and_shape():
    state = numbered_state(tiny_model())
    ours = state["blocks.0.mixer.conv1d.weight"]
    theirs = export_state(state, tiny_model())["backbone.layers.0.mixer.conv1d.weight"]
    first, second = (half.split((32, 16, 16)) for half in ours.chunk(2))
    assert torch.equal(theirs, torch.cat([torch.cat(pair) for pair in zip(first, second, strict=True)])[:, None])


def test_queries_keys_and_values_are_split():
    # 2 key-value heads of 16, each with 2 query heads
    state = numbered_state(tiny_model())
    first, second = (half.split((32, 16, 16)) for half in state["blocks.2.mixer.qkv_proj.weight"].chunk(2))
    exported = export_state(state, tiny_model())
    for letter, parts in zip("qkv", zip(first, second, strict=True), strict=True):
        assert torch.equal(exported[f"backbone.layers.2.mixer.{letter}_proj.weight"], torch.cat(parts))


def test_table_names_every_parameter_once():
    cfg = tiny_model()
    ours = [entry.ours for entry in name_table(cfg)]
    theirs = [name for entry in name_table(cfg) for name in entry.theirs]
    assert sorted(ours) == sorted(name for name, _ in build_model(cfg).named_parameters())
    assert len(theirs) == len(set(theirs))


def test_the_other_prefix_is_read():
    cfg = tiny_model()
    exported = export_state(numbered_state(cfg), cfg)
    renamed = {name.replace("backbone.", "model."): t for name, t in exported.items()}
    assert import_state(renamed, cfg).keys() == import_state(exported, cfg).keys()


def test_missing_and_unknown_tensors_are_named():
    cfg = tiny_model()
    exported = export_state(numbered_state(cfg), cfg)
    exported["backbone.extra"] = exported.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\], unknown \['backbone.extra'\]"):
        import_state(exported, cfg)


def test_experts_are_one_tensor_each_on_disk():
    cfg = tiny_model(pattern="ME")
    state = numbered_state(cfg)
    exported = export_state(state, cfg)
    for index in range(8):
        theirs = exported[f"backbone.layers.1.mixer.experts.{index}.up_proj.weight"]
        assert torch.equal(theirs, state["blocks.1.mixer.experts.up_proj.weight"][index])
    bias = "blocks.1.mixer.router.e_score_correction_bias"
    assert torch.equal(exported["backbone.layers.1.mixer.gate.e_score_correction_bias"], state[bias])


def test_multi_token_prediction_is_left_out():
    cfg = tiny_model(pattern="M/*")
    exported = export_state(numbered_state(cfg), cfg)
    assert not any("mtp" in name for name in exported)
    assert import_state(exported | {"mtp.layers.0.eh_proj.weight": torch.ones(1)}, cfg).keys() == {
        name for name in build_model(cfg).state_dict() if not name.startswith("mtp.")
    }


@pytest.mark.parametrize(
    ("pattern", "changes", "word"),
    [
        ("-", {"mlp": replace(TINY_MLP, activation=Activation.swiglu)}, "swiglu"),
        ("*", {"attention": replace(TINY_ATTENTION, position=Position.rope)}, "position"),
        ("*", {"attention": replace(TINY_ATTENTION, qk_norm=True)}, "qk_norm"),
        ("*", {"attention": replace(TINY_ATTENTION, window_tokens=8)}, "window_tokens"),
        ("*", {"attention": replace(TINY_ATTENTION, qkv_bias=True)}, "qkv_bias"),
        ("E", {"moe": replace(TINY_MOE, score=RouterScore.softmax)}, "softmax"),
    ],
)
def test_what_nemotron_h_does_not_have_is_refused(pattern, changes, word):
    with pytest.raises(ValueError, match=word):
        name_table(tiny_model(pattern=pattern, **changes))
