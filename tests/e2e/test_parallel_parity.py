"""Two processes train as one does with the same global batch."""

import pytest

from tests.support.runs import RunDirs

LOSSES = ("train/loss", "val/loss", "val/loss_bf16")


@pytest.fixture(scope="module")
def runs(module_dirs: RunDirs) -> RunDirs:
    """The FP32 run of two ranks as a user starts it."""
    for recipe in ("fp32", "nvfp4"):
        assert module_dirs.train(f"{recipe}_1", f"recipe={recipe}", "run.stop_after_steps=4") == 0
    done = module_dirs.run("fp32_2", "recipe=fp32", "run.stop_after_steps=4", ranks=2)
    assert done.returncode == 0, done.stderr
    assert module_dirs.train_on_ranks("nvfp4_2", "recipe=nvfp4", "run.stop_after_steps=4", ranks=2) == 0
    return module_dirs


def pairs(runs: RunDirs, recipe: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    return list(zip(runs.rows(f"{recipe}_1"), runs.rows(f"{recipe}_2"), strict=True))


@pytest.mark.distributed
def test_fp32_losses_agree(runs: RunDirs):
    for one, two in pairs(runs, "fp32"):
        assert one.keys() == two.keys()
        for key in (key for key in LOSSES if key in one):
            # the two ranks add their losses and gradients in another order
            assert two[key] == pytest.approx(one[key], rel=1e-5)


@pytest.mark.distributed
def test_nvfp4_rounds_the_same_way(runs: RunDirs):
    """Before anything was updated the ranks hold equal weights and equal microbatches, so every rounding is the same.

    What is left is the order of two sums. A rounding that depended on the rank would move these losses by 1e-4.
    """
    for one, two in pairs(runs, "nvfp4")[:2]:
        for key in (key for key in LOSSES if key in one):
            assert two[key] == pytest.approx(one[key], rel=3e-7)
    # gradients went through stochastic rounding
    [(_, _), (one, two), *_] = pairs(runs, "nvfp4")
    assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-6)


@pytest.mark.distributed
def test_two_ranks_that_share_every_layer_train_as_one_and_one_goes_on(module_dirs: RunDirs):
    model = ["model.mamba.num_groups=2", "recipe=nvfp4", "parallel.tp_reduce_dtype=fp32"]
    assert module_dirs.train_on_ranks("tp", *model, "parallel.tp_degree=2", "run.stop_after_steps=2", ranks=2) == 0
    assert module_dirs.train("tp", *model, "run.stop_after_steps=3") == 0
    assert module_dirs.train("tp_not", *model, "run.stop_after_steps=3") == 0
    for found, expected in zip(module_dirs.rows("tp"), module_dirs.rows("tp_not"), strict=True):
        for key in (key for key in LOSSES if key in expected):
            assert found[key] == pytest.approx(expected[key], rel=2e-3)
        # FLOPs are those of whole layers.
        assert found.get("perf/fp4_flops_share") == expected.get("perf/fp4_flops_share")


@pytest.mark.distributed
def test_a_checkpoint_of_two_ranks_goes_on_with_one(runs: RunDirs):
    assert runs.train("fp32_2", "recipe=fp32", "run.stop_after_steps=5") == 0
    assert runs.train("fp32_1", "recipe=fp32", "run.stop_after_steps=5") == 0
    assert runs.rows("fp32_2")[-1]["train/loss"] == pytest.approx(runs.rows("fp32_1")[-1]["train/loss"], rel=1e-5)
