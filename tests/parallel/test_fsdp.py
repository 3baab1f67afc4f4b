"""What FSDP2 does to dtypes and gradients, which the engine relies on."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from nvfp4_train.config.problem import ConfigError
from nvfp4_train.config.recipe import ComputeDtype
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.init import init_parameters
from nvfp4_train.parallel.apply import parallelize
from nvfp4_train.parallel.fsdp import (
    _place_experts,
    _reshard_experts,
    apply_fsdp,
    fsdp_modules,
    parameters_in_compute_dtype,
    prepare_backward,
    reshard,
)
from nvfp4_train.parallel.materialize import materialize
from nvfp4_train.parallel.mesh import Mesh, build_mesh
from nvfp4_train.parallel.runtime import Runtime
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.linear import QuantizedLinear
from tests.support.engines import train
from tests.support.ranks import run_on_ranks
from tests.support.recipes import cast_recipe
from tests.support.tiny import SEQUENCE_LENGTH, parallel_layout, tiny_batches, tiny_model, tiny_optimizer, torch_engine


@dataclass
class Seen:
    """What the parameters of a model looked like.

    Args:
        weights: Dtype that each parameter's own module saw in forward.
        gradients: Full gradient of each parameter.
        gathered: Names of parameters that were not sharded after forward and backward, and after an evaluation.
    """

    weights: dict[str, torch.dtype]
    gradients: dict[str, Tensor]
    gathered: tuple[list[str], list[str]]


def build_bf16(mesh: Mesh, *, tie_embeddings: bool, reshard_after_forward: bool = True) -> HybridLM:
    with torch.device("meta"):
        model = HybridLM(tiny_model(tie_embeddings=tie_embeddings))
    apply_precision(model, cast_recipe(ComputeDtype.bf16), seed=0)
    engine_cfg = torch_engine(reshard_after_forward=reshard_after_forward)
    parallelize(
        model, mesh=mesh, parallel_cfg=parallel_layout(), engine_cfg=engine_cfg, compute_dtype=model.compute_dtype
    )
    materialize(model, mesh=mesh, seed=0)
    return model


def watch_weights(model: nn.Module) -> dict[str, torch.dtype]:
    seen = {}

    def note(prefix: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[f"{prefix}.{name}"] = parameter.dtype

    for prefix, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, prefix=prefix: note(prefix, module))
    return seen


def gathered(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not hasattr(parameter, "placements")]


def run_step(model: HybridLM, batches: list[Batch], *, keeps_gathered: bool = False) -> None:
    for index, batch in enumerate(batches):
        prepare_backward(model, is_last=index == len(batches) - 1, keeps_gathered=keeps_gathered)
        loss = model(
            batch.tokens, document_ids=batch.document_ids, position_ids=batch.position_ids, labels=batch.labels
        )
        (loss / 100).backward()


def look(runtime: Runtime, tie_embeddings: bool, reshard_after_forward: bool) -> Seen:
    mesh = build_mesh(parallel_layout(), runtime)
    model = build_bf16(mesh, tie_embeddings=tie_embeddings, reshard_after_forward=reshard_after_forward)
    weights = watch_weights(model)
    batches = tiny_batches(step=0)[mesh.dp_rank :: mesh.dp_degree]
    run_step(model, batches, keeps_gathered=not reshard_after_forward)
    after_step = gathered(model)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    batch = tiny_batches(step=0)[mesh.dp_rank]
    with torch.no_grad():
        model(batch.tokens, document_ids=batch.document_ids)
    reshard(model)
    return Seen(weights, gradients, (after_step, gathered(model)))


def look_at_all(runtime: Runtime) -> dict[tuple[bool, bool], Seen]:
    cases = [(False, True), (True, True), (False, False)]
    return {(tied, freed): look(runtime, tied, freed) for tied, freed in cases}


def gradients_by_microbatch(runtime: Runtime) -> list[dict[str, Tensor]]:
    """Gradient of each microbatch alone, on one rank that holds everything."""
    mesh = build_mesh(parallel_layout(), runtime)
    model = build_bf16(mesh, tie_embeddings=False)
    found = []
    for batch in tiny_batches(step=0):
        run_step(model, [batch])
        found.append({name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()})
        model.zero_grad()
    return found


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[tuple[bool, bool], Seen]]:
    return run_on_ranks(look_at_all, 2)


@pytest.fixture(scope="module")
def by_microbatch() -> list[dict[str, Tensor]]:
    return run_on_ranks(gradients_by_microbatch, 1)[0]


@pytest.mark.distributed
def test_linears_see_bf16_and_everything_else_fp32(on_two_ranks):
    with torch.device("meta"):
        model = HybridLM(tiny_model())
    apply_precision(model, cast_recipe(ComputeDtype.bf16), seed=0)
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    for seen in on_two_ranks:
        found = seen[False, True].weights
        assert found.keys() == dict(model.named_parameters()).keys()
        assert {name for name, dtype in found.items() if dtype is torch.bfloat16} == linears
        assert {dtype for name, dtype in found.items() if name not in linears} == {torch.float32}


@pytest.mark.distributed
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_what_another_engine_sends_in_bf16_is_what_fsdp_does(on_two_ranks, tie_embeddings):
    with torch.device("meta"):
        model = HybridLM(tiny_model(tie_embeddings=tie_embeddings))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for seen in on_two_ranks:
        in_bf16 = {name for name, dtype in seen[tie_embeddings, True].weights.items() if dtype is torch.bfloat16}
        assert in_bf16 == {names[parameter] for parameter in parameters_in_compute_dtype(model)}


@pytest.mark.distributed
def test_gradients_are_the_fp32_sums_of_the_microbatches_without_any_rounding(on_two_ranks, by_microbatch):
    """Two ranks add up two microbatches each, and then each other's sums; a BF16 detour anywhere would show."""
    for seen in on_two_ranks:
        for name, found in seen[False, True].gradients.items():
            first, second, third, fourth = (gradients[name] for gradients in by_microbatch)
            assert found.dtype is torch.float32
            assert torch.equal(found, (first + third) + (second + fourth)), name
            # A row of the embedding's gradient is a BF16 number where its token occurs once.
            needs_fp32 = (first != first.bfloat16()).float().mean()
            if found.ndim == 2:
                assert needs_fp32 > (0.05 if name == "embedding.weight" else 0.9), f"{name} is made of BF16 numbers"


@pytest.mark.distributed
def test_keeping_weights_gathered_changes_no_gradient(on_two_ranks):
    for seen in on_two_ranks:
        freed, kept = seen[False, True].gradients, seen[False, False].gradients
        assert all(torch.equal(freed[name], kept[name]) for name in freed)


@pytest.mark.distributed
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_gradients_are_those_of_the_model_that_is_not_sharded(on_two_ranks, tie_embeddings):
    plain = plain_gradients(tie_embeddings=tie_embeddings)
    for seen in on_two_ranks:
        found = seen[tie_embeddings, True].gradients
        assert found.keys() == plain.keys()
        for name in found:
            # The same numbers, added up in another order: FP32 rounding only.
            torch.testing.assert_close(found[name], plain[name], rtol=1e-4, atol=1e-7)


def plain_gradients(*, tie_embeddings: bool) -> dict[str, Tensor]:
    model = HybridLM(tiny_model(tie_embeddings=tie_embeddings))
    apply_precision(model, cast_recipe(ComputeDtype.bf16), seed=0)
    init_parameters(model, model.cfg, seed=0)
    for batch in tiny_batches(step=0):
        loss = model(
            batch.tokens, document_ids=batch.document_ids, position_ids=batch.position_ids, labels=batch.labels
        )
        (loss / 100).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.distributed
def test_no_weight_stays_gathered_after_a_step_or_an_evaluation(on_two_ranks):
    for seen in on_two_ranks:
        for case in seen.values():
            assert case.gathered == ([], [])


@pytest.mark.parametrize(
    ("size", "num_shards", "expected"), [(2, 4, 2), (4, 2, True), (4, 6, True), (True, 4, True), (False, 4, False)]
)
def test_experts_are_freed_wholly_where_a_copy_does_not_fit(size, num_shards, expected):
    assert _reshard_experts(size, num_shards=num_shards) is expected


def few_experts(runtime: Runtime) -> tuple[str, dict[str, Tensor]]:
    """Two experts on four ranks, which would leave two without work if experts were not cut."""
    mesh = build_mesh(parallel_layout(), runtime)
    model = build_with_experts()
    parallelize(
        model, mesh=mesh, parallel_cfg=parallel_layout(), engine_cfg=torch_engine(), compute_dtype=torch.float32
    )
    materialize(model, mesh=mesh, seed=0)
    run_step(model, tiny_batches(step=0)[mesh.dp_rank :: mesh.dp_degree])
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return str(model.blocks[0].mixer.experts.up_proj.weight.placements), gradients


def build_with_experts() -> HybridLM:
    cfg = tiny_model("E")
    cfg = replace(cfg, moe=replace(cfg.moe, num_experts=2, top_k=1))
    with torch.device("meta"):
        model = HybridLM(cfg)
    apply_precision(model, cast_recipe(ComputeDtype.fp32), seed=0)
    return model


@pytest.mark.distributed
def test_experts_that_are_fewer_than_ranks_are_cut():
    plain = build_with_experts().to_empty(device="cpu")
    init_parameters(plain, plain.cfg, seed=0)
    for batch in tiny_batches(step=0):
        loss = plain(
            batch.tokens, document_ids=batch.document_ids, position_ids=batch.position_ids, labels=batch.labels
        )
        (loss / 100).backward()
    for placements, gradients in run_on_ranks(few_experts, 4):
        assert placements == "(Shard(dim=1),)"
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("num_experts", "out_features", "dim"), [(8, 64, 0), (4, 64, 0), (2, 64, 1), (2, 66, 0)], ids=str
)
def test_experts_are_cut_where_they_are_few_and_can_be(num_experts, out_features, dim):
    parameter = nn.Parameter(torch.empty(num_experts, out_features, 16))
    assert _place_experts(parameter, num_shards=4) == Shard(dim)


def test_a_plain_module_has_no_groups():
    assert fsdp_modules(nn.Linear(2, 2)) == []


def reshard_to_neighbours(runtime: Runtime) -> tuple[list[tuple[float, float]], list[tuple[float, float]], str]:
    """Curves with weights that stay spread over two ranks until backward, and over all four."""
    found = []
    for ranks in (2, 0):
        layout = parallel_layout()
        engine = build_engine(
            prepare_model(tiny_model(), cast_recipe(ComputeDtype.bf16), seed=0),
            mesh=build_mesh(layout, runtime),
            parallel_cfg=layout,
            engine_cfg=torch_engine(reshard_ranks=ranks),
            optimizer_cfg=tiny_optimizer(),
            sequence_length=SEQUENCE_LENGTH,
        )
        found.append(train(engine, range(2)))
    with torch.device("meta"):
        model = HybridLM(tiny_model())
    with pytest.raises(ConfigError, match=r"engine.reshard_ranks = 3\n.*must divide the 4 ranks") as caught:
        apply_fsdp(
            model,
            mesh=build_mesh(parallel_layout(), runtime),
            compute_dtype=torch.float32,
            reshard_after_forward=3,
        )
    return found[0], found[1], str(caught.value)


@pytest.mark.distributed
def test_weights_may_stay_spread_over_neighbours_until_backward():
    for neighbours, everybody, _ in run_on_ranks(reshard_to_neighbours, 4):
        assert neighbours == everybody
