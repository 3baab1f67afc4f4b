import pytest
import torch
from torch import Tensor

from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.recipe import ComputeDtype, RecipeConfig
from nvfp4_train.parallel.activation import checkpoint_activations
from nvfp4_train.precision.apply import apply_precision
from tests.support.models import document_ids, initialized
from tests.support.recipes import cast_recipe, nvfp4_recipe
from tests.support.tiny import tiny_model

TOKENS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))


def run(mode: ActivationCheckpoint, recipe: RecipeConfig) -> tuple[Tensor, dict[str, Tensor], int, int]:
    """Return the loss, the gradients, the elements that forward keeps, and the products that a step computes."""
    model = initialized(tiny_model("M-*E/E"))
    apply_precision(model, recipe, seed=0)
    checkpoint_activations(model, mode)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(TOKENS, document_ids=document_ids(13, 19, rows=2), labels=TOKENS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    # Inside the GEMM's operator: the profiler counts the operator itself even where its kept result is returned.
    products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, sum(kept.values()), products


@pytest.mark.parametrize("recipe", [cast_recipe(ComputeDtype.fp32), nvfp4_recipe()], ids=["fp32", "nvfp4"])
@pytest.mark.parametrize("mode", [ActivationCheckpoint.block, ActivationCheckpoint.selective])
def test_changes_no_bit(mode, recipe):
    loss, gradients, _, _ = run(ActivationCheckpoint.none, recipe)
    again, recomputed, _, _ = run(mode, recipe)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)


def test_block_keeps_less_and_selective_recomputes_less():
    _, _, all_kept, products = run(ActivationCheckpoint.none, nvfp4_recipe())
    _, _, block_kept, block_products = run(ActivationCheckpoint.block, nvfp4_recipe())
    _, _, _, selective_products = run(ActivationCheckpoint.selective, nvfp4_recipe())
    assert block_kept < 0.5 * all_kept
    assert block_products > selective_products >= products


def test_names_stay():
    model = initialized(tiny_model("M-*E/E"))
    names = list(model.state_dict())
    checkpoint_activations(model, ActivationCheckpoint.block)
    assert list(model.state_dict()) == names
