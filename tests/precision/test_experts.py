"""Quantized experts are quantized Linears, one per expert."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_train.config.recipe import ComputeDtype, LinearRecipe
from nvfp4_train.model.linear import GroupedLinear, Linear
from nvfp4_train.numerics.spec import Format, GemmMode
from nvfp4_train.precision.apply import apply_precision, compute_dtype_recipe
from nvfp4_train.precision.coverage import format_coverage
from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.high_precision import high_precision
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.monitor import recorded_amax
from nvfp4_train.precision.position import RoundingPosition
from tests.support.models import document_ids, initialized, tiny_model
from tests.support.recipes import cast_table, nvfp4_recipe, nvfp4_table

COUNTS = (16, 0, 5, 27)
ENDS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)


def precision(recipe: LinearRecipe, layer: str) -> LinearPrecision:
    return LinearPrecision(
        layer=layer,
        recipe_name="test",
        recipe=recipe,
        high_precision=compute_dtype_recipe(ComputeDtype.bf16),
        gemm=GemmMode.fp32_exact,
    )


def make(recipe: LinearRecipe) -> tuple[QuantizedExperts, list[QuantizedLinear]]:
    grouped = GroupedLinear(4, 32, 48, uses_per_token=1)
    torch.nn.init.normal_(grouped.weight, generator=torch.Generator().manual_seed(0))
    position = RoundingPosition(seed=3, step=5, row_offset=64)
    singles = []
    for index in range(4):
        linear = Linear(32, 48)
        linear.weight.data.copy_(grouped.weight.data[index])
        single = QuantizedLinear.from_linear(linear, precision=precision(recipe, f"e.{index}"), position=position)
        singles.append(single)
    return QuantizedExperts(grouped, precision=precision(recipe, "e"), position=position), singles


def draw(columns: int, seed: int) -> Tensor:
    return torch.randn(sum(COUNTS), columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_one_by_one(singles: list[QuantizedLinear], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Send each expert's tokens, padded with zeros, through a Linear of its own."""
    ys, dxs = [], []
    for single, tokens, grad in zip(singles, x.split(COUNTS), dy.split(COUNTS), strict=True):
        missing = -len(tokens) % 16
        padded = torch.nn.functional.pad(tokens, (0, 0, 0, missing)).requires_grad_()
        if len(padded) == 0:
            continue
        y = single(padded)
        y.backward(torch.nn.functional.pad(grad, (0, 0, 0, missing)))
        ys.append(y[: len(tokens)])
        dxs.append(padded.grad[: len(tokens)])
    return torch.cat(ys), torch.cat(dxs)


@pytest.mark.parametrize(
    "recipe",
    [
        nvfp4_table(),
        nvfp4_table(hadamard=False),
        LinearRecipe(fprop=nvfp4_table().fprop, dgrad=cast_table(Format.bf16).dgrad, wgrad=nvfp4_table().wgrad),
    ],
    ids=["nvfp4", "no transform", "dgrad in BF16"],
)
def test_equals_one_linear_per_expert_bit_for_bit(recipe):
    experts, singles = make(recipe)
    x, dy = draw(32, 1).requires_grad_(), draw(48, 2)
    y = experts(x, ENDS)
    y.backward(dy)
    wanted_y, wanted_dx = run_one_by_one(singles, x.detach(), dy)
    assert torch.equal(y, wanted_y)
    assert torch.equal(x.grad, wanted_dx)
    assert experts.weight.grad.dtype == torch.float32
    for index, single in enumerate(singles):
        wanted = torch.zeros(48, 32) if single.weight.grad is None else single.weight.grad
        assert torch.equal(experts.weight.grad[index], wanted)
    for name, amax in experts.amax.items():
        assert amax.item() == max(single.amax[name].item() for single in singles if single.amax)


def test_casts_are_grouped_gemms():
    experts, _ = make(cast_table(Format.bf16))
    x = draw(32, 1)
    wanted = torch.cat([part @ w.bfloat16().T for part, w in zip(x.split(COUNTS), experts.weight, strict=True)])
    torch.testing.assert_close(experts(x, ENDS), wanted)
    assert not experts.amax


def test_high_precision_is_the_compute_dtype():
    experts, _ = make(nvfp4_table())
    plain, _ = make(cast_table(Format.bf16))
    with high_precision(experts.position):
        assert torch.equal(experts(draw(32, 1), ENDS), plain(draw(32, 1), ENDS))
    assert not torch.equal(experts(draw(32, 1), ENDS), plain(draw(32, 1), ENDS))


def test_packed_operands_are_what_is_saved():
    experts, _ = make(nvfp4_table())
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        experts(draw(32, 1).requires_grad_(), ENDS)
    assert {tensor.dtype for tensor in saved} == {torch.uint8, torch.float32}
    assert all(tensor.numel() == 1 for tensor in saved if tensor.dtype is torch.float32)  # amax
    num_bytes = sum(tensor.numel() for tensor in saved if tensor.dtype is torch.uint8)
    assert num_bytes == (3 * 48 * 32 + 64 * 32) * 9 // 16  # three experts have tokens: 16, 5 and 27 make 64 rows


def test_cached_weights_see_an_update():
    experts, _ = make(nvfp4_table())
    x = draw(32, 1)
    before = experts(x, ENDS)
    assert torch.equal(experts(x, ENDS), before)
    with torch.no_grad():
        experts.weight.mul_(2.0)
    torch.testing.assert_close(experts(x, ENDS), 2 * before)
    experts.load_state_dict({"weight": experts.weight.detach() / 2})
    assert torch.equal(experts(x, ENDS), before)


def test_microbatches_draw_their_own_bytes():
    experts, _ = make(nvfp4_table())
    x, dy = draw(32, 1), draw(48, 2)
    grads = []
    for row_offset in (64, 64, 128):
        experts.position.start_microbatch(step=5, row_offset=row_offset)
        leaf = x.clone().requires_grad_()
        experts(leaf, ENDS).backward(dy)
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], grads[2])


def test_bf16_parameters_get_fp32_gradients():
    for recipe in (nvfp4_table(), cast_table(Format.bf16)):
        experts, _ = make(recipe)
        experts.weight = torch.nn.Parameter(experts.weight.detach().bfloat16())
        experts(draw(32, 1), ENDS).sum().backward()
        assert experts.weight.grad.dtype == torch.float32


def test_a_model_with_experts_and_its_coverage():
    cfg = tiny_model(pattern="ME/E", moe=replace(tiny_model().moe, d_latent=16), d_model=64, vocab_size=64)
    cfg = replace(cfg, mamba=replace(cfg.mamba, num_heads=16, d_head=8))
    model = initialized(cfg)
    plan = apply_precision(model, nvfp4_recipe(), seed=0)
    rows = {row.module: row for row in plan.coverage}
    up = rows["blocks.1.mixer.experts.up_proj"]
    assert (up.num_experts, up.uses_per_token, up.flops_per_token) == (8, 2, 2 * 2 * 16 * 32)
    assert up.low_precision_gemms == ["fprop", "dgrad", "wgrad"]
    assert rows["mtp.0.eh_proj"].why == "mtp: multi-token prediction"
    assert rows["mtp.0.blocks.0.mixer.experts.up_proj"].low_precision_gemms == []
    assert "2 of 8 x 16 -> 32" in format_coverage(plan)
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    model(tokens, document_ids=document_ids(13, 19, rows=2), labels=tokens).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(amax.isfinite().all() for amax in recorded_amax(model).values())
    with torch.no_grad():
        model.blocks[1].mixer.experts.up_proj.weight[:] = float("nan")
    model(tokens, document_ids=document_ids(32, rows=2), labels=tokens)
    bad = [name for name, amax in recorded_amax(model).items() if not amax.isfinite().all()]
    assert bad[0] == "blocks.1.mixer.experts.up_proj: fprop.w"


def test_mtp_follows_the_recipe_when_it_may():
    model = initialized(tiny_model(pattern="-/-"))
    plan = apply_precision(model, nvfp4_recipe(keep=replace(nvfp4_recipe().keep_bf16, mtp=False)), seed=0)
    assert {row.why for row in plan.coverage if row.module.startswith("mtp.")} == {"recipe nvfp4"}


def test_a_parameter_that_is_gathered_anew_is_read_anew_and_its_old_memory_let_go():
    """As ZeRO 3 does it: the values go to other memory between forwards, and back to none after each."""
    experts, _ = make(nvfp4_table())
    x = draw(32, 1)
    values = experts.weight.detach().clone()
    before = experts(x, ENDS).detach()
    memory = experts.weight.data.untyped_storage()
    experts.weight.data = values * 2
    experts.position.weights_changed()
    torch.testing.assert_close(experts(x, ENDS).detach(), 2 * before)
    assert torch._C._storage_Use_Count(memory._cdata) == 1  # ours


def test_experts_with_tokens_of_several_ranks_draw_from_rows_of_their_own():
    """Two ranks send up to 64 tokens each to an expert on either of them, from halves of two rows of 64 tokens."""
    linears, _ = make(nvfp4_table())
    linears.num_sources, linears.first_expert = 2, 3
    rows = []
    for rank in range(2):
        linears.position.start_microbatch(step=5, row_offset=256 + 32 * rank, segment=32, stride=64)
        rounder = linears._linear_call(linears.precision.recipe, 1).rounder
        assert rounder.layer.endswith(".4")
        stream = rounder.stream_of("dgrad.dy")
        local = torch.arange(2 * 64)
        segment, stride = stream.row_segment, stream.row_stride
        rows.append(set((stream.row_offset + local // segment * stride + local % segment).tolist()))
    assert len(rows[0] | rows[1]) == 256
    assert min(rows[0]) == 512  # the rows of a microbatch follow those of the microbatches before it
