"""What blocks keep, and that the shortcuts give what a run gives."""

from dataclasses import replace

import pytest

from nvfp4_train.analysis.plan.activations import Activations
from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import BlockKey
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.train import TrainConfig
from nvfp4_train.numerics.kernels import Backend, use
from tests.support.configs import composed

CFG = composed("experiment=paper_12b_nvfp4")
LAYOUT = Layout(micro_batch_size=1, global_batch_size=8, sequence_length=8192)
ALL_KEPT = {LayerKind.mlp: frozenset({"up_proj", "down_proj"}), LayerKind.mamba: frozenset({"in_proj", "out_proj"})}


def activations(cfg: TrainConfig = CFG, device: str = "meta") -> Activations:
    return Activations(model=cfg.model, recipe=cfg.recipe, device=device)


def key(kind: LayerKind, kept: frozenset[str] = frozenset()) -> BlockKey:
    return BlockKey(kind=kind, kept=kept)


def test_an_mlp_keeps_what_its_modules_say():
    """Norm: its input and a root mean square. The activation: its input. Linears: their input in 4.5 bits, or BF16."""
    d_model, d_ff = CFG.model.d_model, CFG.model.mlp.d_ff
    known = activations()
    quantized = known.block(key(LayerKind.mlp), LAYOUT)
    assert quantized == pytest.approx(2 * d_model + 4 + 2 * d_ff + 4.5 / 8 * (d_model + d_ff), rel=1e-3)
    kept = known.block(key(LayerKind.mlp, ALL_KEPT[LayerKind.mlp]), LAYOUT)
    assert kept == pytest.approx(2 * d_model + 4 + 2 * d_ff + 2 * (d_model + d_ff), rel=1e-3)


def test_a_checkpointed_block_keeps_its_input():
    layout = replace(LAYOUT, checkpoint=ActivationCheckpoint.block)
    known = activations()
    assert known.block(key(LayerKind.mamba), layout) == 2 * CFG.model.d_model
    assert known.whole_block(key(LayerKind.mlp), layout) == known.block(key(LayerKind.mlp), LAYOUT)


def test_selective_lies_between():
    known = activations()
    for kind in (LayerKind.mamba, LayerKind.attention):
        sizes = [known.block(key(kind), replace(LAYOUT, checkpoint=mode)) for mode in ("none", "selective", "block")]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("kind", [LayerKind.mamba, LayerKind.attention, LayerKind.mlp])
def test_half_and_whole_tell_every_degree_of_tp(kind: LayerKind):
    known = activations()
    for tp in (4, 8):  # 8 leaves one group of heads
        part = replace(LAYOUT, tp=tp)
        assert known.block(key(kind), part) == pytest.approx(known._block(key(kind), part), rel=2e-3)


def test_the_ends_are_logits_above_all():
    vocab = CFG.model.vocab_size
    known = activations()
    whole = known.ends(LAYOUT)
    assert 2 * vocab < whole < 2.2 * vocab
    assert known.ends(replace(LAYOUT, tp=4)) == pytest.approx(known._ends(replace(LAYOUT, tp=4)), rel=2e-3)


def test_each_depth_of_multi_token_prediction_has_logits_of_its_own():
    cfg = composed("model=demo", "recipe=bf16")
    without = activations(cfg).ends(LAYOUT)
    depths = composed("model=demo", "recipe=bf16", "model.pattern=M-/*-/*-")
    assert activations(depths).ends(LAYOUT) - without > 2 * 2 * cfg.model.vocab_size


def test_sequence_parallel_divides_the_stream():
    known = activations()
    divided = replace(LAYOUT, tp=2)
    whole = replace(divided, sequence_parallel=False)
    more = known.block(key(LayerKind.mlp), whole) - known.block(key(LayerKind.mlp), divided)
    assert more == pytest.approx((2 * CFG.model.d_model + 4) / 2)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("kind", list(LayerKind), ids=lambda kind: kind.name)
def test_the_meta_device_tells_what_a_real_one_keeps(recipe: str, kind: LayerKind):
    """All experts as one Linear included: a CPU runs each with the tokens that were sent to it.

    In plain PyTorch, which is what accelerators run: the CPU's own kernels keep less of a scan.
    """
    cfg = composed("experiment=tiny", f"recipe={recipe}")
    layout = Layout(micro_batch_size=4, global_batch_size=4, sequence_length=256)
    with use(Backend.oracle):
        sizes = [activations(cfg, device).block(key(kind), layout) for device in ("meta", "cpu")]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-2)
