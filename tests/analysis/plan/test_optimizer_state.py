"""State is weighed on a tiny model; test_plan_reality.py holds it against engines."""

import pytest

from nvfp4_train.analysis.plan.optimizer_state import measure_state
from nvfp4_train.analysis.plan.parameters import Parameter
from nvfp4_train.config.pattern import LayerKind
from tests.support.configs import composed

MATRIX = Parameter(name="blocks.0.mixer.up_proj.weight", shape=(64, 32), is_expert=False, is_fp32=False, precision=None)
HEAD = Parameter(name="lm_head.weight", shape=(64, 32), is_expert=False, is_fp32=False, precision=None)


@pytest.mark.parametrize(
    ("overrides", "matrix", "head"),
    [
        ((), 8, 8),  # two moments in FP32
        (("optimizer.state_dtype=bf16",), 4, 4),
        (("optimizer=muon",), 4, 8),  # one momentum for matrices of blocks
    ],
)
def test_bytes_of_an_element(overrides: tuple[str, ...], matrix: int, head: int):
    cfg = composed("model=demo", *overrides)
    state = measure_state(cfg.model, cfg.optimizer)
    constant = state.of(MATRIX, kind=LayerKind.mlp, elements=0)
    assert state.of(MATRIX, kind=LayerKind.mlp, elements=100) - constant == 100 * matrix
    assert state.of(HEAD, kind=None, elements=100) - state.of(HEAD, kind=None, elements=0) == 100 * head


@pytest.mark.parametrize("model", ["demo", "nemotron_3_super_120b_a12b", "paper_1b"])
def test_every_parameter_is_known(model: str):
    cfg = composed(f"model={model}")
    state = measure_state(cfg.model, cfg.optimizer)
    kinds = {kind for kind, _ in state.blocks}
    assert {*cfg.model.layer_kinds, *cfg.model.layer_pattern.mtp} <= kinds
    assert "embedding.weight" in state.ends


def test_offloaded_state_is_on_the_host():
    cfg = composed("model=demo", "optimizer.state_offload=cpu")
    state = measure_state(cfg.model, cfg.optimizer)
    assert state.on_host
    assert state.is_converted
