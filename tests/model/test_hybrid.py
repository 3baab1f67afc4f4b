from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nvfp4_train.config.model import Position
from nvfp4_train.config.moe import Activation
from nvfp4_train.export.huggingface import load_huggingface
from nvfp4_train.model.documents import locate_documents
from nvfp4_train.model.hybrid import HybridLM, build_model
from nvfp4_train.model.loss import IGNORE_INDEX
from nvfp4_train.model.moe import Penalized
from tests.support.models import TINY_ATTENTION, TINY_MLP, document_ids, initialized, tiny_model

GOLDEN = Path(__file__).parents[1] / "golden" / "nemotron_h"


def record(model: HybridLM, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits, and the residual stream after the embedding, each block and the final norm."""
    stream: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, output: stream.append(output.value if isinstance(output, Penalized) else output)
        )
        for module in (model.embedding, *model.blocks, model.final_norm)
    ]
    with torch.no_grad():
        logits = model(tokens, document_ids=torch.zeros(tokens.shape, dtype=torch.int32))
    for hook in hooks:
        hook.remove()
    return logits, stream


# NemotronH records the embedding, each block but the last, and the final norm; Mamba2 each block and the final norm.
@pytest.mark.parametrize(
    ("case", "recorded"),
    [("a_groups1_mha", [0, 1, 2, 3, 4, 5, 6, 8]), ("c_moe", [0, 1, 2, 3, 5]), ("m_mamba2", [1, 2, 3])],
)
def test_golden_logits(case, recorded):
    loaded = load_huggingface(GOLDEN / case)
    model = build_model(loaded.cfg)
    model.load_state_dict(loaded.state)
    reference = load_file(GOLDEN / case / "reference.safetensors")
    logits, stream = record(model, reference["input_ids"])
    assert (logits - reference["logits"]).abs().max() <= 1e-5
    for index, place in enumerate(recorded):
        torch.testing.assert_close(stream[place], reference[f"hidden_states.{index}"], rtol=1e-5, atol=1e-5)


def draw_tokens(*, rows=2, size=40, seed=0) -> torch.Tensor:
    return torch.randint(0, 64, (rows, size), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", list(Position))
def test_another_document_changes_no_bit(dtype, position):
    model = initialized(tiny_model(attention=replace(TINY_ATTENTION, position=position)))
    model.compute_dtype = dtype
    ids = document_ids(13, 20, 7, rows=2)
    tokens, others = draw_tokens(), ids != 1
    changed = torch.where(others, tokens, draw_tokens(seed=1))
    with torch.no_grad():
        before, after = model(tokens, document_ids=ids), model(changed, document_ids=ids)
    assert before.dtype == dtype
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def test_gradients_stay_in_their_document():
    model, ids = initialized(tiny_model()), document_ids(13, 20, 7)
    tokens = torch.arange(40)[None]  # every token once, so that its embedding's gradient is that of one place
    model(tokens, document_ids=ids, labels=tokens.where(ids == 1, IGNORE_INDEX)).backward()
    reached = model.embedding.weight.grad[:40].abs().sum(dim=1) > 0
    assert torch.equal(reached, ids[0] == 1)


def test_packing_gives_the_logits_of_each_document_alone():
    model = initialized(tiny_model(attention=replace(TINY_ATTENTION, position=Position.rope))).double()
    model.compute_dtype = torch.float64
    tokens = draw_tokens(rows=1)
    packed = model(tokens, document_ids=document_ids(13, 20, 7))
    alone = [model(part, document_ids=document_ids(part.shape[1])) for part in tokens.split((13, 20, 7), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)


def test_later_tokens_change_nothing():
    model = initialized(tiny_model()).double()
    model.compute_dtype = torch.float64
    tokens = draw_tokens(rows=1)
    whole = model(tokens, document_ids=document_ids(40))
    torch.testing.assert_close(
        model(tokens[:, :21], document_ids=document_ids(21)), whole[:, :21], rtol=1e-9, atol=1e-9
    )


def test_loss_is_the_sum_over_counted_labels():
    model, tokens, ids = initialized(tiny_model()), draw_tokens(), document_ids(40, rows=2)
    labels = draw_tokens(seed=2)
    labels[:, 30:] = IGNORE_INDEX
    loss = model(tokens, document_ids=ids, labels=labels)
    logits = model(tokens, document_ids=ids)
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters())


def test_bf16_loss_and_gradients_are_close_to_fp32():
    model, tokens, ids = initialized(tiny_model()), draw_tokens(), document_ids(13, 27, rows=2)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model.compute_dtype = dtype
        model.zero_grad()
        loss = model(tokens, document_ids=ids, labels=tokens)
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, grad), (low_loss, low_grad) = results
    assert low_loss == pytest.approx(loss, rel=1e-3)
    assert torch.cosine_similarity(grad, low_grad, dim=0) > 0.999


def test_tied_embeddings_are_one_parameter():
    cfg = tiny_model(tie_embeddings=True)
    tied, untied = initialized(cfg), initialized(tiny_model())
    assert "lm_head.weight" not in tied.state_dict()
    with torch.no_grad():
        untied.load_state_dict(tied.state_dict() | {"lm_head.weight": tied.embedding.weight})
    tokens, ids = draw_tokens(), document_ids(40, rows=2)
    assert torch.equal(tied(tokens, document_ids=ids), untied(tokens, document_ids=ids))
    for model in (tied, untied):
        model(tokens, document_ids=ids, labels=tokens).backward()
    both = untied.embedding.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both)


def test_swiglu_model_runs():
    model = initialized(tiny_model(mlp=replace(TINY_MLP, activation=Activation.swiglu)))
    assert model(draw_tokens(), document_ids=document_ids(40, rows=2)).isfinite().all()


def test_parameter_count_of_a_small_model():
    mamba = 32 * 2 * (2 * 32 + 2 * 16 + 2) + 2 * (32 + 2 * 16) * (4 + 1) + 3 * 4 + 64 + 64 * 32
    attention = 32 * (4 + 2 * 2) * 16 + 64 * 32
    mlp = 2 * 32 * 64
    total = 2 * 64 * 32 + 2 * mamba + attention + 2 * mlp + 6 * 32
    assert sum(p.numel() for p in build_model(tiny_model()).parameters()) == total


def test_names_are_those_of_checkpoints():
    names = {name for name, _ in build_model(tiny_model()).named_modules()}
    linears = {name for name, module in build_model(tiny_model()).named_modules() if isinstance(module, nn.Linear)}
    assert linears == {
        *(f"blocks.{block}.mixer.{name}" for block in (0, 4) for name in ("in_proj", "out_proj")),
        *(f"blocks.{block}.mixer.{name}" for block in (1, 3) for name in ("up_proj", "down_proj")),
        *(f"blocks.2.mixer.{name}" for name in ("qkv_proj", "o_proj")),
        "lm_head",
    }
    assert {
        "embedding",
        "blocks.0.norm",
        "blocks.0.mixer.norm",
        "blocks.0.mixer.scan",
        "blocks.0.mixer.conv1d",
        "final_norm",
    } <= names


def test_parameters_outside_gemms_live_in_modules_kept_in_fp32():
    for name, module in build_model(tiny_model()).named_modules():
        own = list(module.parameters(recurse=False))
        if own and not isinstance(module, nn.Linear | nn.Embedding):
            assert module.keep_fp32, name


def test_a_residual_stream_in_fp32():
    model = initialized(tiny_model(residual_fp32=True))
    tokens, ids = draw_tokens(), document_ids(40, rows=2)
    same = initialized(tiny_model())
    assert torch.equal(model(tokens, document_ids=ids), same(tokens, document_ids=ids))
    model.compute_dtype = same.compute_dtype = torch.bfloat16
    logits, stream = record(model, tokens)
    assert logits.dtype == torch.bfloat16
    assert {h.dtype for h in stream} == {torch.float32}
    exact = initialized(tiny_model())(tokens, document_ids=ids)
    assert (logits - exact).abs().mean() < (same(tokens, document_ids=ids) - exact).abs().mean()


def test_penalties_change_gradients_and_not_the_value():
    cfg = tiny_model(pattern="ME")
    with_penalty = replace(cfg, moe=replace(cfg.moe, z_loss_weight=0.1, auxiliary_loss_weight=0.1))
    plain, penalized = initialized(cfg), initialized(with_penalty)
    tokens, ids = draw_tokens(), document_ids(40, rows=2)
    losses = [model(tokens, document_ids=ids, labels=tokens) for model in (plain, penalized)]
    assert torch.equal(losses[0], losses[1])
    assert plain.extra_losses == {}
    for loss in losses:
        loss.backward()
    extra = penalized.extra_losses["router"][0]
    router = penalized.blocks[1].mixer.router
    stream = penalized.blocks[0](penalized.embedding(tokens), locate_documents(ids))
    penalty = router(penalized.blocks[1].norm(stream).flatten(0, 1)).penalty
    torch.testing.assert_close(extra, penalty.detach() * tokens.numel())
    (own,) = torch.autograd.grad(penalty * tokens.numel(), router.weight)
    torch.testing.assert_close(router.weight.grad, plain.blocks[1].mixer.router.weight.grad + own, rtol=1e-4, atol=1e-5)
