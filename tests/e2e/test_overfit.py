"""A tiny model learns eight rows by heart: every gradient arrives, in BF16 and through NVFP4's rounding."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nvfp4_train.config.run import Device
from nvfp4_train.config.scheduler import LinearConfig
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.build import build_engine, prepare_model
from nvfp4_train.parallel.mesh import Mesh, build_mesh
from nvfp4_train.parallel.runtime import start_runtime, stop_runtime
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.metrics import read_step
from nvfp4_train.train.pace import Pace
from nvfp4_train.train.state import StepResult, TrainState
from nvfp4_train.train.trainer import Trainer
from tests.support.configs import composed

ROWS, LENGTH, STEPS = 8, 32, 50


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    runtime = start_runtime(Device.cpu)
    yield build_mesh(composed("experiment=tiny").parallel, runtime)
    stop_runtime()


class EightRows:
    """The same eight rows of random tokens in every step."""

    def __init__(self, vocab_size: int) -> None:
        rng = torch.Generator().manual_seed(7)
        tokens = torch.randint(vocab_size, (ROWS, LENGTH + 1), generator=rng)
        self._batch = Batch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            document_ids=torch.zeros(ROWS, LENGTH, dtype=torch.int32),
            position_ids=torch.arange(LENGTH).repeat(ROWS, 1),
            microbatch_index=0,
        )

    def step_batches(self, *, first_sequence: int, num_sequences: int) -> list[Batch]:
        assert num_sequences == ROWS
        return [self._batch]


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def step_ended(self, trainer: Trainer, result: StepResult) -> None:
        self.values.append(read_step(result).loss)


class NoEvaluation:
    def run(self, engine: object) -> None:
        return None


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_eight_rows_are_memorized(mesh: Mesh, recipe: str):
    cfg = composed("experiment=tiny", f"recipe={recipe}")
    prepared = prepare_model(cfg.model, cfg.recipe, seed=1)
    optimizer = replace(cfg.optimizer, weight_decay=0.0, weight_decay_start=0.0)
    engine = build_engine(
        prepared,
        mesh=mesh,
        parallel_cfg=cfg.parallel,
        engine_cfg=cfg.engine,
        optimizer_cfg=optimizer,
        sequence_length=LENGTH,
    )
    losses = Losses()
    trainer = Trainer(
        engine=engine,
        data=SimpleNamespace(loader=EightRows(cfg.model.vocab_size)),  # type: ignore[arg-type]
        evaluation=NoEvaluation(),  # type: ignore[arg-type]
        pace=Pace(
            run=replace(cfg.run, tokens=STEPS * ROWS * LENGTH),
            batch=replace(cfg.batch, sequence_length=LENGTH, micro_batch_size=ROWS, global_batch_size=ROWS),
            optimizer=optimizer,
            scheduler=LinearConfig(max_lr=1e-2, min_lr=0.0, warmup_init_lr=0.0, warmup_tokens=10 * ROWS * LENGTH),
            evaluation_interval=0,
        ),
        state=TrainState(),
        callbacks=[losses],
    )
    trainer.fit(evaluate_first=False)
    engine.close()
    assert losses.values[0] > 6.0  # log(512): nothing known yet
    assert losses.values[-1] < 0.1
