import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvfp4_train.export.parity import compare_logits

GOLDEN = Path(__file__).parents[1] / "golden" / "nemotron_h"

NEMOTRON_H = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
ODD = {
    "hidden_size": 45,
    "intermediate_size": 71,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 7,
    "ssm_state_size": 11,
    "mamba_head_dim": 5,
    "chunk_size": 9,
    "n_routed_experts": 7,
    "moe_intermediate_size": 19,
    "moe_shared_expert_intermediate_size": 13,
}
NEMOTRON_H_CASES = {
    "groups 1, sequence shorter than a chunk": ("M-M*-", {"n_groups": 1, "chunk_size": 64}, 37),
    "groups 2": ("M-M*M-", {}, 53),
    "groups 8, one query head per key-value head": ("MM*-", {"n_groups": 8, "num_key_value_heads": 4}, 48),
    "one key-value head": ("*M*-", {"num_key_value_heads": 1}, 33),
    "experts": ("ME*E", {}, 41),
    "experts in groups": ("ME-E", {"n_group": 4, "topk_group": 2}, 29),
    "latent experts": ("ME*E", {"moe_latent_size": 32}, 50),
    "weights that do not add up to 1": ("MEE", {"norm_topk_prob": False}, 24),
    "biases": ("M-*-", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}, 30),
    "odd widths": ("M*-E", ODD, 31),
    "odd widths, 8 groups, latent experts": (
        "M-*E",
        ODD | {"n_groups": 8, "conv_kernel": 3, "moe_latent_size": 14},
        23,
    ),
    "short convolution": ("MM-", {"conv_kernel": 2, "use_conv_bias": False}, 19),
    "one long chunk, with strong decays": ("M*-E", {"chunk_size": 256, "mamba_num_heads": 16}, 200),
    "a time step limit that transformers ignores": ("M*", {"time_step_limit": (0.1, 0.2), "time_step_min": 0.05}, 20),
    "one token": ("M*-E", {}, 1),
    "all experts": ("ME", {"num_experts_per_tok": 8, "routed_scaling_factor": 0.5}, 20),
    "a shared expert of width 0, which is that of an MLP": ("ME*", {"moe_shared_expert_intermediate_size": 0}, 20),
    "a flag for tying that transformers ignores, GELU": (
        "M-*",
        {"tie_word_embeddings": True, "mlp_hidden_act": "gelu"},
        30,
    ),
}
MAMBA2 = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "num_hidden_layers": 3,
    "n_groups": 2,
    "chunk_size": 16,
    "tie_word_embeddings": False,
}
MAMBA2_CASES = {
    "groups 1": ({"n_groups": 1}, 37),
    "groups 8, dt limits": ({"n_groups": 8, "time_step_limit": (0.02, 0.5)}, 48),
    "biases": ({"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False}, 29),
    "tied embeddings": ({"tie_word_embeddings": True}, 20),
    "odd widths, one chunk": (
        {"hidden_size": 39, "num_heads": 6, "head_dim": 13, "state_size": 7, "n_groups": 3, "chunk_size": 256},
        60,
    ),
    "short convolution": ({"conv_kernel": 2, "chunk_size": 5}, 21),
}


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", minversion="5.9")  # the first with MLP blocks in NemotronH
    module.logging.set_verbosity_error()
    return module


@pytest.mark.parametrize("case", ["a_groups1_mha", "c_moe", "m_mamba2"])
def test_golden_folders(case):
    assert compare_logits(GOLDEN / case).max_difference <= 1e-5


def test_the_floor_of_dt_can_be_chosen():
    assert compare_logits(GOLDEN / "c_moe", dt_min=0.0).max_difference > 1e-4
    assert compare_logits(GOLDEN / "c_moe", dt_min=0.001).max_difference <= 1e-5


def test_a_reference_that_does_not_fit_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "m_mamba2", tmp_path, dirs_exist_ok=True)
    reference = load_file(tmp_path / "reference.safetensors")
    save_file({"input_ids": reference["input_ids"]}, tmp_path / "reference.safetensors")
    with pytest.raises(ValueError, match="no tensor 'logits'"):
        compare_logits(tmp_path)
    short = reference["logits"][:, :-1].contiguous()
    save_file({"input_ids": reference["input_ids"], "logits": short}, tmp_path / "reference.safetensors")
    with pytest.raises(ValueError, match="logits must be"):
        compare_logits(tmp_path)
    (tmp_path / "reference.safetensors").unlink()
    with pytest.raises(ValueError, match="is missing"):
        compare_logits(tmp_path)


def draw_weights(model, *, seed: int) -> None:
    """No tensor at its default: norms, skips, biases and corrections too."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=rng)
            if name.endswith(("A_log", "dt_bias")):
                tensor.copy_(noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            elif tensor.ndim < 2:
                tensor.copy_(0.2 * noise + (0.0 if name.endswith("bias") else 1.0))
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)


def check_against(model, folder: Path, *, size: int, dtype=torch.float32, **saving: Any) -> None:
    draw_weights(model, seed=size)
    model.eval().to(dtype)
    model.config._experts_implementation = "eager"  # its grouped GEMM has no FP64
    tokens = torch.randint(0, 96, (2, size), generator=torch.Generator().manual_seed(size))
    model.save_pretrained(folder, **saving)
    model.float()
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        exact = model.double()(input_ids=tokens, use_cache=False).logits.double()
    own_distance = (logits - exact).abs().max().item()
    save_file({"input_ids": tokens, "logits": logits.contiguous()}, folder / "reference.safetensors")
    assert compare_logits(folder).max_difference <= max(1e-5, 3 * own_distance)
    assert own_distance < 1e-4  # else the line above says nothing
    save_file({"input_ids": tokens, "logits": exact.contiguous()}, folder / "reference.safetensors")
    assert compare_logits(folder, dtype=torch.float64).max_difference <= max(1e-5, 3 * own_distance)


@pytest.mark.peer
@pytest.mark.parametrize("case", NEMOTRON_H_CASES)
def test_fresh_nemotron_h(transformers, tmp_path, case):
    pattern, changes, size = NEMOTRON_H_CASES[case]
    cfg = transformers.NemotronHConfig(**NEMOTRON_H | changes, hybrid_override_pattern=pattern)
    check_against(transformers.NemotronHForCausalLM(cfg), tmp_path, size=size)


@pytest.mark.peer
def test_weights_saved_in_bf16_and_in_shards(transformers, tmp_path):
    cfg = transformers.NemotronHConfig(**NEMOTRON_H, hybrid_override_pattern="ME*-M-")
    model = transformers.NemotronHForCausalLM(cfg)
    check_against(model, tmp_path, size=35, dtype=torch.bfloat16, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1


@pytest.mark.peer
@pytest.mark.parametrize("case", MAMBA2_CASES)
def test_fresh_mamba2(transformers, tmp_path, case):
    changes, size = MAMBA2_CASES[case]
    check_against(transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**MAMBA2 | changes)), tmp_path, size=size)
