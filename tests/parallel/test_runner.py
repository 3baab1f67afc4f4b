from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nvfp4_train.config.run import Device
from nvfp4_train.data.batch import Batch
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.parallel.apply import parallelize
from nvfp4_train.parallel.fsdp import fsdp_modules
from nvfp4_train.parallel.materialize import materialize
from nvfp4_train.parallel.mesh import Mesh, build_mesh
from nvfp4_train.parallel.runner import WholeModelRunner, model_inputs
from nvfp4_train.parallel.runtime import start_runtime, stop_runtime
from tests.support.tiny import parallel_layout, tiny_batches, tiny_model, torch_engine


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    yield build_mesh(parallel_layout(), start_runtime(Device.cpu))
    stop_runtime()


@pytest.fixture
def model(mesh) -> HybridLM:
    with torch.device("meta"):
        model = HybridLM(tiny_model())
    parallelize(
        model, mesh=mesh, parallel_cfg=parallel_layout(), engine_cfg=torch_engine(), compute_dtype=torch.float32
    )
    materialize(model, mesh=mesh, seed=0)
    return model


def gathered(model: HybridLM) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not hasattr(parameter, "placements")]


def test_losses_are_summed_and_gradients_are_of_the_divided_loss(model):
    runner = WholeModelRunner(model, keeps_gathered=False)
    batches = tiny_batches(step=0)
    started: list[int] = []

    def start(batch: Batch) -> Batch:
        started.append(batch.microbatch_index)
        return batch

    total = runner.forward_backward(batches, torch.tensor(10.0), start=start)
    assert started == [0, 1, 2, 3]
    once = model.get_parameter("final_norm.weight").grad.full_tensor().clone()
    model.zero_grad()
    again = runner.forward_backward(batches, torch.tensor(5.0), start=start)
    assert torch.equal(total, again)
    torch.testing.assert_close(model.get_parameter("final_norm.weight").grad.full_tensor(), 2 * once)
    losses = [runner.evaluate(batch, start=start) for batch in batches]
    torch.testing.assert_close(torch.stack(losses).sum(), total)


def test_the_model_computes_what_start_returns(model):
    runner = WholeModelRunner(model, keeps_gathered=False)
    batch = tiny_batches(step=0)[0]
    other = replace(batch, tokens=batch.tokens.flip(1))
    with torch.no_grad():
        plain, changed = (runner.evaluate(batch, start=lambda _, result=result: result) for result in (batch, other))
    assert not torch.equal(plain, changed)


def test_nothing_stays_gathered_after_an_evaluation(model):
    runner = WholeModelRunner(model, keeps_gathered=True)
    with torch.no_grad():
        runner.evaluate(tiny_batches(step=0)[0], start=lambda batch: batch)
    assert gathered(model) == []
    assert fsdp_modules(model)


def test_every_parameter_counts(model):
    runner = WholeModelRunner(model, keeps_gathered=False)
    assert {id(p) for p in runner.parameters_of_norm()} == {id(p) for p in model.parameters()}


def test_a_model_reads_what_a_batch_has():
    batch = tiny_batches(step=0)[0]
    inputs = model_inputs(batch)
    assert set(inputs) == {"tokens", "document_ids", "position_ids", "labels"}
    assert all(value is getattr(batch, name) for name, value in inputs.items())
