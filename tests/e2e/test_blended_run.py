"""A run over token files: phases, named validation sets, resuming, and data that change on the way."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from nvfp4_train.checkpoint.folder import read_metadata
from tests.support.runs import RunDirs
from tests.support.token_files import write_pair

SWITCHED = "data.phases={broad: {end_fraction: 0.5, weights: {web: 0.75, code: 0.25}}, late: {end_fraction: 1}}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("token_files")
    rng = np.random.default_rng(0)
    for name, number in (("web", 60), ("code", 30), ("held_out", 20)):
        write_pair(folder / name, [rng.integers(0, 256, size=size).tolist() for size in rng.integers(20, 200, number)])
    return folder


def overrides(files: Path, *more: str) -> list[str]:
    return [
        "data=indexed",
        f"data.sources={{web: {{paths: [{files}/web], weight: 0.5}}, code: {{paths: [{files}/code], weight: 0.5}}}}",
        f"data.validation={{web: {{paths: [{files}/held_out]}}, code: {{paths: [{files}/code]}}}}",
        f"data.cache_dir={files}/cache",
        SWITCHED,
        *more,
    ]


class BlendedRuns(RunDirs):
    """Runs of 10 steps over token files."""

    def overrides(self, name: str, *overrides: str) -> list[str]:
        own = {"data=text_files"}
        base = [text for text in super().overrides(name) if text not in own and not text.startswith("data.")]
        return [*base, *overrides]


@pytest.fixture
def runs(tmp_path: Path) -> BlendedRuns:
    return BlendedRuns(tmp_path, cache=tmp_path / "cache")


def test_it_logs_what_each_source_gave_and_resumes_bitwise(runs: BlendedRuns, files: Path):
    assert runs.train("whole", *overrides(files)) == 0
    assert runs.train("halves", *overrides(files, "run.stop_after_steps=4")) == 0
    assert runs.train("halves", *overrides(files)) == 0
    rows = runs.rows("whole")
    assert runs.rows("halves")[-3:] == rows[-3:]
    last = rows[-1]
    # 80 rows of 64 tokens: 40 at three to one, 40 at one to one.
    assert (last["data/web/tokens"], last["data/code/tokens"]) == (50 * 64, 30 * 64)
    assert 0 < last["data/code/epochs"] < 2
    for name in ("web", "code"):
        assert last[f"val/{name}/loss"] > 0
        assert last[f"val/{name}/loss_bf16"] > 0
    assert min(last["val/web/loss"], last["val/code/loss"]) < last["val/loss"]
    assert last["val/loss"] < max(last["val/web/loss"], last["val/code/loss"])
    assert (runs.runs / "whole" / "data.png").stat().st_size > 10_000
    metadata = read_metadata(runs.runs / "whole" / "checkpoints" / "step_00000010")
    assert metadata["data"]["sources"]["web"]["tokens"] == 50 * 64


@pytest.mark.distributed
def test_it_goes_on_with_other_ranks_and_batches(runs: BlendedRuns, files: Path):
    assert runs.train("whole", *overrides(files)) == 0
    assert runs.train_on_ranks("parts", *overrides(files, "run.stop_after_steps=4"), ranks=2) == 0
    assert runs.train("parts", *overrides(files, "batch.micro_batch_size=2")) == 0
    for whole, parts in zip(runs.rows("whole"), runs.rows("parts"), strict=True):
        assert whole.keys() <= parts.keys()  # where it stopped it was evaluated too
        for key in whole:
            if key.startswith("data/"):
                assert parts[key] == whole[key]
            elif "loss" in key:  # four bits, rounded in other microbatches
                assert parts[key] == pytest.approx(whole[key], rel=0.02)


def test_other_data_are_refused_or_make_a_new_phase(
    runs: BlendedRuns, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    own = tmp_path / "files"
    shutil.copytree(files, own)
    assert runs.train("run", *overrides(own, "run.stop_after_steps=4")) == 0
    write_pair(own / "code", [list(range(200))] * 20)
    assert runs.train("run", *overrides(own)) == 1
    told = capsys.readouterr().err
    assert "found:    fingerprint " in told
    assert "expected: fingerprint " in told
    assert "source code: its fingerprint was " in told
    assert runs.train("run", *overrides(own, "data.on_change=new_phase")) == 0
    told = capsys.readouterr().out
    assert "source web: goes on at token 1,536" in told
    assert "source code: goes on at token 0" in told
    last = runs.rows("run")[-1]
    assert last["step"] == 10
    # 8 more rows of the first phase, then 40 of the second: 6 + 20 of web on top of 24, 2 + 20 of code.
    assert (last["data/web/tokens"], last["data/code/tokens"]) == (50 * 64, 22 * 64)


def test_a_blend_that_would_have_read_something_else_is_refused(
    runs: BlendedRuns, files: Path, capsys: pytest.CaptureFixture[str]
):
    assert runs.train("run", *overrides(files, "run.stop_after_steps=4")) == 0
    changed = "data.phases={broad: {end_fraction: 0.5, weights: {web: 0.5, code: 0.5}}, late: {end_fraction: 1}}"
    assert runs.train("run", *overrides(files, changed)) == 1
    assert "source web: 1,536 tokens were read, and this blend would have read 1,024" in capsys.readouterr().err
