"""QuantizedLinear against the same computation written out by hand, against float64, and against its promises."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.recipe import LinearRecipe, WgradRow
from nvfp4_train.numerics.gemm import exact_gemm
from nvfp4_train.numerics.quantize import Direction, dequantize, gemm_operand, quantize
from nvfp4_train.numerics.random import RandomStream, stream_key
from nvfp4_train.numerics.spec import Block, Format, GemmMode, GlobalScale, OperandSpec, Rounding, ScaleRule
from nvfp4_train.precision import operands
from nvfp4_train.precision.linear import LinearPrecision, QuantizedLinear
from nvfp4_train.precision.position import RoundingPosition
from tests.support.recipes import cast_table, nvfp4_table

TOKENS, INPUTS, OUTPUTS = 64, 96, 48
SEED, STEP, ROW_OFFSET = 7, 3, 128


def make_linear(
    recipe: LinearRecipe, *, bias: bool = False, high: Format = Format.bf16, gemm: GemmMode = GemmMode.fp32_exact
) -> QuantizedLinear:
    precision = LinearPrecision(
        layer="proj", recipe_name="test", recipe=recipe, high_precision=cast_table(high), gemm=gemm
    )
    position = RoundingPosition(seed=SEED, step=STEP, row_offset=ROW_OFFSET)
    generator = torch.Generator().manual_seed(0)
    linear = QuantizedLinear(INPUTS, OUTPUTS, bias=bias, precision=precision, position=position)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(INPUTS))
    return linear


def make_data(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(TOKENS, INPUTS, generator=generator), torch.randn(TOKENS, OUTPUTS, generator=generator)
    return x.to(dtype).requires_grad_(), (dy / 100).to(dtype)


def run(linear: QuantizedLinear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """One forward and backward of a leaf copy of x; y, dx, dw."""
    leaf = x.detach().clone().requires_grad_()
    linear.zero_grad()
    y = linear(leaf)
    y.backward(dy)
    return {"y": y.detach(), "dx": leaf.grad, "dw": linear.weight.grad.clone()}


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[OperandSpec]:
    """The specs that are quantized from now on, to packed codes or to values for use at once, alone or in pairs."""
    seen: list[OperandSpec] = []
    for name in ("quantize", "quantize_operand"):
        original: Callable[..., object] = getattr(operands, name)

        def counted(tensor, spec, *, original=original, **options):
            seen.append(spec)
            return original(tensor, spec, **options)

        monkeypatch.setattr(operands, name, counted)
    both = operands.quantize_both

    def counted_both(tensor, row, column, **options):
        seen.extend([row.spec, column.spec])
        return both(tensor, row, column, **options)

    monkeypatch.setattr(operands, "quantize_both", counted_both)
    return seen


def same_specs(found: list[OperandSpec], expected: list[OperandSpec]) -> bool:
    """Compare without the order, which depends on whether x and dy are rounded in one pass."""
    return sorted(map(repr, found)) == sorted(map(repr, expected))


def quantized_by_hand(linear: QuantizedLinear, x: Tensor, dy: Tensor) -> dict[str, object]:
    specs, w = linear.precision.recipe.operands, linear.weight.detach().to(torch.bfloat16)
    keys = {name: stream_key(seed=SEED, layer="proj", operand=name, step=STEP) for name in ("dgrad.dy", "wgrad.dy")}
    along_rows = RandomStream(keys["dgrad.dy"], row_offset=ROW_OFFSET)  # [tokens, outputs]
    along_columns = RandomStream(keys["wgrad.dy"], column_offset=ROW_OFFSET)  # [outputs, tokens]
    return {
        "fprop.x": quantize(x, specs["fprop.x"], direction=Direction.row),
        "fprop.w": quantize(w, specs["fprop.w"], direction=Direction.row),
        "dgrad.dy": quantize(dy, specs["dgrad.dy"], direction=Direction.row, stream=along_rows),
        "dgrad.w": quantize(w, specs["dgrad.w"], direction=Direction.column),
        "wgrad.x": quantize(x, specs["wgrad.x"], direction=Direction.column),
        "wgrad.dy": quantize(dy, specs["wgrad.dy"], direction=Direction.column, stream=along_columns),
    }


@pytest.mark.parametrize("weight_block", [Block.tile_16x16, Block.row_1x16])
def test_three_gemms_equal_the_hand_written_ones_bitwise(weight_block):
    linear = make_linear(nvfp4_table(weight_block=weight_block))
    x, dy = make_data()
    result = run(linear, x, dy)
    ops = {name: gemm_operand(q) for name, q in quantized_by_hand(linear, x.detach(), dy).items()}
    mode = GemmMode.fp32_exact
    y = exact_gemm(ops["fprop.x"], ops["fprop.w"], mode=mode, out_dtype=torch.bfloat16)
    dx = exact_gemm(ops["dgrad.dy"], ops["dgrad.w"], mode=mode, out_dtype=torch.bfloat16)
    dw = exact_gemm(ops["wgrad.dy"], ops["wgrad.x"], mode=mode, out_dtype=torch.float32)
    assert torch.equal(result["y"], y)
    # the transposed tile codes of fprop and an independent quantization of w^T are the same operand; their memory
    # layout differs, and with it possibly the order of the FP32 sums
    torch.testing.assert_close(result["dx"], dx, rtol=2**-7, atol=1e-6)
    assert (result["dx"] != dx).float().mean() < 0.01
    assert torch.equal(result["dw"], dw)


def test_the_gemms_are_right_in_float64():
    linear = make_linear(nvfp4_table())
    x, dy = make_data()
    result = run(linear, x, dy)
    exact = {name: dequantize(q).double() for name, q in quantized_by_hand(linear, x.detach(), dy).items()}
    for name, a, b, unit in [
        ("y", exact["fprop.x"], exact["fprop.w"], 2**-8),
        ("dx", exact["dgrad.dy"], exact["dgrad.w"], 2**-8),
        ("dw", exact["wgrad.dy"], exact["wgrad.x"], 2**-24),
    ]:
        expected, size = a @ b.t(), a.abs() @ b.abs().t()
        # one rounding of the result; below it FP32 sums, the FP32 factor alpha and the FP32 products of dequantize
        bound = unit * expected.abs() * 1.001 + 100 * 2**-24 * size
        assert ((result[name].double() - expected).abs() <= bound).all(), name


def test_the_hadamard_transforms_cancel_and_rounding_errors_are_as_large_as_four_bits_make_them():
    linear = make_linear(nvfp4_table())
    x, dy = make_data()
    result = run(linear, x, dy)
    w = linear.weight.detach().double()
    truth = {
        "y": x.detach().double() @ w.t(),
        "dx": dy.double() @ w,
        "dw": dy.double().t() @ x.detach().double(),
    }
    for name, expected in truth.items():
        error = (result[name].double() - expected).norm() / expected.norm()
        # two operands with about 9 % (nearest) or 13 % (stochastic) error each; uncancelled transforms would give 140 %
        assert 0.05 < error < 0.25, (name, error)


def test_the_bf16_recipe_is_a_bf16_linear_with_an_fp32_weight_gradient():
    linear = make_linear(cast_table(Format.bf16), bias=True, gemm=GemmMode.auto)
    x, dy = make_data()
    result = run(linear, x, dy)
    leaf, weight = x.detach().clone().requires_grad_(), linear.weight.detach().to(torch.bfloat16)
    expected = F.linear(leaf, weight, linear.bias.detach().to(torch.bfloat16))
    expected.backward(dy)
    # BF16 has 8 bits; bias is added after the rounding of the product, so up to two roundings apart
    torch.testing.assert_close(result["y"], expected.detach(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(result["dx"], leaf.grad, rtol=2**-7, atol=2**-12)
    dw = dy.double().t() @ x.detach().double()
    assert result["dw"].dtype is torch.float32
    torch.testing.assert_close(result["dw"].double(), dw, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(linear.bias.grad, dy.float().sum(0))


def test_the_fp32_recipe_has_the_gradients_of_autograd():
    linear = make_linear(cast_table(Format.fp32), bias=True, high=Format.fp32)
    x, dy = make_data(torch.float32)
    result = run(linear, x, dy)
    reference = nn.Linear(INPUTS, OUTPUTS).double()
    reference.load_state_dict({name: value.double() for name, value in linear.state_dict().items()})
    leaf = x.detach().double().requires_grad_()
    expected = reference(leaf)
    expected.backward(dy.double())
    assert {value.dtype for value in result.values()} == {torch.float32}
    for name, value in [("y", expected), ("dx", leaf.grad), ("dw", reference.weight.grad)]:
        torch.testing.assert_close(result[name].double(), value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(linear.bias.grad.double(), reference.bias.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ablation", "changed"),
    [
        ({"hadamard": False}, {"dw"}),
        ({"gradient_rounding": Rounding.nearest_even}, {"dx", "dw"}),
        ({"weight_block": Block.row_1x16}, {"y", "dx"}),
    ],
)
def test_an_ablation_changes_what_it_switches_off_and_nothing_else(ablation, changed):
    x, dy = make_data()
    full, less = run(make_linear(nvfp4_table()), x, dy), run(make_linear(nvfp4_table(**ablation)), x, dy)
    assert {name for name in full if not torch.equal(full[name], less[name])} == changed


def special_recipe(**changes: object) -> LinearRecipe:
    """The nearest-even table without Hadamard transforms, some fields of all activations and gradients changed."""
    table = nvfp4_table(gradient_rounding=Rounding.nearest_even, hadamard=False)
    cells = {name: replace(spec, **changes) for name, spec in table.operands.items() if not name.endswith(".w")}
    return LinearRecipe(
        fprop=replace(table.fprop, x=cells["fprop.x"]),
        dgrad=replace(table.dgrad, dy=cells["dgrad.dy"]),
        wgrad=WgradRow(x=cells["wgrad.x"], dy=cells["wgrad.dy"]),
    )


@pytest.mark.parametrize(
    "recipe",
    [
        special_recipe(global_scale=GlobalScale.row),
        special_recipe(scale_rule=ScaleRule.four_over_six_mse, block_scale_max=256),
        replace(nvfp4_table(), dgrad=cast_table(Format.bf16).dgrad),
        replace(nvfp4_table(), wgrad=cast_table(Format.bf16).wgrad),
        replace(nvfp4_table(), fprop=cast_table(Format.bf16).fprop),
    ],
    ids=["row_scaled", "four_over_six", "bf16_dgrad", "bf16_wgrad", "bf16_fprop"],
)
def test_any_table_of_cells_runs(recipe):
    linear = make_linear(recipe)
    x, dy = make_data()
    result = run(linear, x, dy)
    linear(x[:32])  # a record of another number of rows
    w = linear.weight.detach().double()
    for name, expected in {"y": x.double() @ w.t(), "dx": dy.double() @ w, "dw": dy.double().t() @ x.double()}.items():
        error = (result[name].double() - expected).norm() / expected.norm()
        assert error < 0.25, (name, error)
        is_cast = not recipe.operands[{"y": "fprop.x", "dx": "dgrad.dy", "dw": "wgrad.dy"}[name]].is_quantized
        assert (error < 0.01) == is_cast, (name, error)
    assert all(amax.shape == (1,) for amax in linear.amax.values())


def test_leading_dims_are_tokens():
    linear = make_linear(nvfp4_table())
    x, dy = make_data()
    flat = run(linear, x, dy)
    deep = run(linear, x.view(2, 32, INPUTS), dy.view(2, 32, OUTPUTS))
    assert all(torch.equal(flat[name], deep[name].reshape(flat[name].shape)) for name in flat)


def test_a_gradient_that_is_not_contiguous_is_read_right():
    linear = make_linear(nvfp4_table())
    x, dy = make_data()
    strided = dy.t().contiguous().t()
    assert not strided.is_contiguous()
    plain, other = run(linear, x, dy), run(linear, x, strided)
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_a_backward_draws_the_bytes_of_its_own_microbatch_after_the_position_has_moved():
    linear = make_linear(nvfp4_table())
    x, dy = make_data()
    expected = run(linear, x, dy)["dx"]
    leaf = x.detach().clone().requires_grad_()
    y = linear(leaf)
    linear.position.start_microbatch(step=STEP + 1, row_offset=0)
    linear(x.detach())
    y.backward(dy)
    assert torch.equal(leaf.grad, expected)
    assert not torch.equal(run(linear, x, dy)["dx"], expected)


@pytest.mark.parametrize(("needs_dx", "needs_dw"), [(True, False), (False, True)])
def test_only_the_gradients_that_are_needed_are_prepared(monkeypatch, needs_dx, needs_dw):
    linear = make_linear(nvfp4_table(weight_block=Block.row_1x16))
    specs = linear.precision.recipe.operands
    linear.weight.requires_grad_(needs_dw)
    x, dy = make_data()
    calls = count_calls(monkeypatch)
    y = linear(x.detach().requires_grad_(needs_dx))
    forward = [specs["fprop.x"], specs["fprop.w"]] + [specs["dgrad.w"]] * needs_dx + [specs["wgrad.x"]] * needs_dw
    assert same_specs(calls, forward)
    y.backward(dy)
    assert same_specs(calls, forward + [specs["dgrad.dy"]] * needs_dx + [specs["wgrad.dy"]] * needs_dw)


def test_evaluation_prepares_no_gradient(monkeypatch):
    linear = make_linear(nvfp4_table(weight_block=Block.row_1x16))
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        linear(make_data()[0])
    assert calls == [linear.precision.recipe.operands[name] for name in ("fprop.x", "fprop.w")]


def saved_bytes(linear: QuantizedLinear, x: Tensor) -> int:
    """Bytes that autograd keeps from a forward, parameters excluded."""
    parameters = {parameter.data_ptr() for parameter in linear.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x)
    return sum(sizes.values())


def test_what_is_saved_for_backward_is_packed():
    x = make_data()[0].detach()  # no gradient for x, so no weight is saved either
    in_bf16 = saved_bytes(make_linear(cast_table(Format.bf16)), x)
    in_nvfp4 = saved_bytes(make_linear(nvfp4_table()), x)
    assert in_bf16 == TOKENS * INPUTS * 2
    assert in_nvfp4 == TOKENS * INPUTS * 9 // 16 + 4  # codes, scales and the amax
    assert in_nvfp4 <= 0.30 * in_bf16


def test_bf16_operands_are_saved_without_a_copy():
    linear = make_linear(cast_table(Format.bf16))
    x = make_data()[0]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        linear(x)
    assert set(saved) == {x.data_ptr(), linear.weight.data_ptr()}


@pytest.mark.parametrize("recipe", [nvfp4_table(), cast_table(Format.bf16)])
def test_a_bf16_parameter_gets_an_fp32_gradient_that_adds_up_in_fp32(recipe):
    linear = make_linear(recipe, bias=True)
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.bfloat16))
    linear.bias = nn.Parameter(linear.bias.detach().to(torch.bfloat16))
    x, dy = make_data()
    linear(x).backward(dy)
    once = linear.weight.grad.clone()
    assert once.dtype is linear.bias.grad.dtype is torch.float32
    assert not torch.equal(once, once.to(torch.bfloat16).float())
    linear(x).backward(dy)
    assert torch.equal(linear.weight.grad, 2 * once)


def test_a_master_and_its_bf16_cast_give_the_same_bits():
    x, dy = make_data()
    master, cast = make_linear(nvfp4_table()), make_linear(nvfp4_table())
    cast.weight = nn.Parameter(cast.weight.detach().to(torch.bfloat16))
    a, b = run(master, x, dy), run(cast, x, dy)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("recipe", [nvfp4_table(), nvfp4_table(weight_block=Block.row_1x16)])
def test_the_weight_is_quantized_once_a_step(monkeypatch, recipe):
    linear = make_linear(recipe)
    x, dy = make_data()
    run(linear, x, dy)
    calls = count_calls(monkeypatch)
    linear.position.start_microbatch(step=STEP, row_offset=0)
    run(linear, x, dy)
    assert same_specs(calls, [recipe.fprop.x, recipe.wgrad.x, recipe.dgrad.dy, recipe.wgrad.dy])


def test_two_microbatches_of_a_step_give_what_fresh_weights_give():
    x, dy = make_data()
    linear = make_linear(nvfp4_table())
    run(linear, x, dy)
    cached, fresh = run(linear, x, dy), run(make_linear(nvfp4_table()), x, dy)
    assert all(torch.equal(cached[name], fresh[name]) for name in cached)


def test_an_optimizer_step_and_a_load_are_seen():
    linear, x = make_linear(nvfp4_table()), make_data()[0]
    state = copy.deepcopy(linear.state_dict())
    before = linear(x)
    before.sum().backward()
    torch.optim.SGD(linear.parameters(), lr=0.1).step()
    linear.position.weights_changed()
    after = linear(x)
    assert not torch.equal(before, after)
    linear.load_state_dict(state)
    assert torch.equal(linear(x), before)


def test_values_that_change_behind_the_counters_are_seen_once_the_engine_says_so():
    linear, x = make_linear(nvfp4_table()), make_data()[0]
    before = linear(x)
    linear.weight.data.mul_(-1)  # as under FSDP2: the same parameter object, and _version does not move
    assert torch.equal(linear(x), before)
    linear.position.weights_changed()
    assert torch.equal(linear(x), -before)


def test_a_load_under_fsdp2_is_seen_without_a_counter():
    linear, x = make_linear(nvfp4_table()), make_data()[0]
    before = linear(x)
    linear.weight.data.mul_(-1)
    linear._load_from_state_dict({}, "", {}, False, [], [], [])
    assert torch.equal(linear(x), -before)


def test_a_move_forgets_the_quantized_weight():
    linear, x = make_linear(nvfp4_table()), make_data()[0]
    linear(x)
    linear.weight.data.mul_(-1)
    linear.to(torch.float32)
    assert torch.equal(linear(x), make_linear(nvfp4_table())(x).neg())


@pytest.mark.parametrize("gemm", [GemmMode.fp32_exact, GemmMode.auto])
def test_nan_in_x_reaches_every_output_and_is_never_a_finite_code(gemm):
    linear = make_linear(nvfp4_table(), gemm=gemm)
    x, dy = make_data()
    with torch.no_grad():
        x[5, 7] = math.nan
    result = run(linear, x, dy)
    assert result["y"].isnan().all()
    assert result["dw"].isnan().all()
    assert result["dx"].isfinite().all()
    assert {name for name, amax in linear.amax.items() if amax.isnan().any()} == {"fprop.x", "wgrad.x"}


def test_amax_records_hold_the_maximum_of_a_step_and_start_anew_with_the_next():
    linear = make_linear(nvfp4_table())
    x = make_data()[0].detach()
    linear(x)
    linear(x * 4)
    linear(x)
    assert linear.amax["fprop.x"].item() == 4 * x.abs().max().item()
    linear.position.start_microbatch(step=STEP + 1, row_offset=0)
    linear(x)
    assert linear.amax["fprop.x"].item() == x.abs().max().item()


def test_the_amax_hook_sees_every_quantized_operand_and_decides():
    linear = make_linear(nvfp4_table())
    seen: list[str] = []

    def reduce_amax(name: str, amax: Tensor) -> Tensor:
        seen.append(name)
        return amax * 2

    linear.reduce_amax = reduce_amax
    x, dy = make_data()
    run(linear, x, dy)
    assert sorted(seen) == ["dgrad.dy", "fprop.w", "fprop.x", "wgrad.dy", "wgrad.x"]  # the shared weight once
    assert linear.amax["fprop.x"].item() == 2 * x.abs().max().item()


def test_slices_of_sequences_give_the_results_of_the_whole():
    """Two ranks hold a half of each of two sequences."""
    linear = make_linear(nvfp4_table())
    x, dy = make_data()
    tokens = x.shape[0] // 4
    amax: dict[str, Tensor] = {}

    def keep(name: str, own: Tensor) -> Tensor:
        return amax.setdefault(name, own)  # that of the whole, which runs first

    linear.reduce_amax = keep
    linear.position.start_microbatch(step=STEP, row_offset=0)
    whole = run(linear, x, dy)
    for rank in range(2):
        first = rank * tokens
        held = torch.arange(4 * tokens).view(2, 2 * tokens)[:, first : first + tokens].flatten()
        linear.position.start_microbatch(step=STEP, row_offset=first, segment=tokens, stride=2 * tokens)
        own = run(linear, x[held], dy[held])
        assert torch.equal(own["y"], whole["y"][held])
        assert torch.equal(own["dx"], whole["dx"][held])


def test_tokens_that_do_not_fill_blocks_are_refused_by_name():
    linear = make_linear(nvfp4_table())
    with pytest.raises(ValueError, match=r"proj: found 24 tokens, recipe test needs a multiple of 16"):
        linear(torch.zeros(2, 12, INPUTS, dtype=torch.bfloat16))
    make_linear(cast_table(Format.bf16))(torch.zeros(2, 12, INPUTS, dtype=torch.bfloat16))


def test_from_linear_hands_over_the_parameters_themselves():
    linear = nn.Linear(INPUTS, OUTPUTS, device="meta").eval()
    precision = make_linear(nvfp4_table()).precision
    quantized = QuantizedLinear.from_linear(linear, precision=precision, position=RoundingPosition(seed=0))
    assert quantized.weight is linear.weight
    assert quantized.bias is linear.bias
    assert list(quantized.state_dict()) == ["weight", "bias"]
    assert not quantized.training
    assert "recipe=test" in repr(quantized)
