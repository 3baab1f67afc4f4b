import pytest

from nvfp4_train.config.suggest import choice_fix, closest, key_fix

KEYS = ["batch.sequence_length", "batch.ramp.start", "model.d_model", "model.mamba.num_heads", "scheduler.max_lr"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("modl.d_model", "model.d_model"),
        ("model.d_modl", "model.d_model"),
        ("d_model", "model.d_model"),
        ("optimizer.max_lr", "scheduler.max_lr"),
        ("lr", "scheduler.max_lr"),
        ("batch.seq_len", "batch.sequence_length"),
        ("model.mamba.heads", "model.mamba.num_heads"),
    ],
)
def test_the_key_that_was_meant(key, meant):
    assert key_fix(key, KEYS) == f"did you mean {meant}?"


def test_several_keys_may_have_been_meant():
    keys = ["model.mamba.num_heads", "model.attention.num_heads"]
    assert key_fix("num_heads", keys) == "did you mean model.mamba.num_heads or model.attention.num_heads?"


def test_a_key_like_no_other_lists_those_beside_it():
    assert key_fix("batch.qqq", KEYS) == "keys of batch: sequence_length, ramp"
    assert key_fix("qqq", KEYS) == "groups and keys: batch, model, scheduler"
    assert key_fix("qqq.zzz", KEYS) == "groups and keys: batch, model, scheduler"


def test_choices():
    assert closest("nvfp5", ["bf16", "nvfp4"]) == "nvfp4"
    assert closest("qqq", ["bf16", "nvfp4"]) is None
    assert choice_fix("nvfp5", ["bf16", "nvfp4"]) == "did you mean nvfp4? choices: bf16, nvfp4"
    assert choice_fix("qqq", ["bf16", "nvfp4"]) == "choices: bf16, nvfp4"
