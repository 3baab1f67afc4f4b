from dataclasses import replace

import pytest

from nvfp4_train.config.parallel import StageBalance
from nvfp4_train.config.pipeline import PipelineSchedule, microbatches_fault, step_problems
from tests.support.configs import composed, load_problems, problems_of

ROOT = composed("experiment=tiny")
SCHEDULES = {schedule.value: schedule for schedule in PipelineSchedule}


def layout_problems(schedule: str, pp_degree: int, stages_per_rank: int) -> list[str]:
    changes = {
        "pipeline_schedule": SCHEDULES[schedule],
        "pp_degree": pp_degree,
        "stages_per_rank": stages_per_rank,
    }
    return [problem.rule for problem in problems_of(lambda: replace(ROOT.parallel, **changes))]


@pytest.mark.parametrize(
    ("schedule", "pp_degree", "stages_per_rank", "words"),
    [
        ("1f1b", 1, 2, "must be 1"),
        ("1f1b", 2, 2, "one stage per rank"),
        ("gpipe", 2, 2, "one stage per rank"),
        ("interleaved", 2, 1, "at least 2"),
        ("zbv", 2, 1, "exactly 2"),
        ("zbv", 2, 3, "exactly 2"),
    ],
)
def test_stages_that_a_schedule_cannot_have(schedule, pp_degree, stages_per_rank, words):
    (rule,) = layout_problems(schedule, pp_degree, stages_per_rank)
    assert words in rule


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 3), ("zbv", 2)],
)
def test_stages_that_a_schedule_can_have(schedule, stages_per_rank):
    parallel = replace(
        ROOT.parallel, pp_degree=2, pipeline_schedule=SCHEDULES[schedule], stages_per_rank=stages_per_rank
    )
    assert parallel.num_stages == 2 * stages_per_rank


@pytest.mark.parametrize(
    ("schedule", "good", "bad"),
    [
        ("gpipe", [1, 2, 3, 8], []),
        ("1f1b", [4, 5, 9], [1, 3]),
        ("interleaved", [4, 6, 8, 10], [3, 9, 11]),
        ("zero_bubble", [4, 6, 8, 10], [3, 9, 11]),
        ("zbv", [8, 9], [1, 7]),
    ],
)
def test_microbatches_of_a_step(schedule, good, bad):
    """With four ranks; a schedule in rounds takes as many rounds of at least four as fit."""
    for number in (*good, *bad):
        fault = microbatches_fault(SCHEDULES[schedule], pp_degree=4, num_microbatches=number)
        assert bool(fault) is (number in bad), (number, fault)
    assert not microbatches_fault(SCHEDULES[schedule], pp_degree=1, num_microbatches=1)


def test_every_size_of_a_ramp_is_looked_at():
    batch = replace(
        ROOT.batch,
        micro_batch_size=1,
        global_batch_size=8,
        ramp=replace(ROOT.batch.ramp, tokens=1000, start=2, increment=2),
    )
    schedule = SCHEDULES["1f1b"]
    assert step_problems(batch, schedule=schedule, pp_degree=2, dp_degree=1) == []
    (problem,) = step_problems(batch, schedule=schedule, pp_degree=4, dp_degree=1)
    assert problem.key == "ramp.increment"
    assert "of 2 sequences" in problem.rule
    keys = [problem.key for problem in step_problems(batch, schedule=schedule, pp_degree=16, dp_degree=1)]
    assert keys == ["ramp.increment", "global_batch_size"]


TINY = ("experiment=tiny", "parallel.pp_degree=2", "parallel.dp_shard_degree=1")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["model.pattern=M|*-|M-"], "model.pattern", "3 segments between |, and the pipeline has 2 stages"),
        (["model.pattern=M*-M-|"], "model.pattern", "segment 1 is empty"),
        (["model.pattern=M"], "model.pattern", "1 blocks do not fill 2 stages"),
        (["batch.global_batch_size=4"], "batch.global_batch_size", "needs at least 2"),
        (
            [
                "model.tie_embeddings=true",
                "parallel.pipeline_schedule=zbv",
                "parallel.stages_per_rank=2",
                "batch.micro_batch_size=1",
            ],
            "parallel.pipeline_schedule",
            "tied embeddings",
        ),
        (
            [
                "model.pattern=M*-M/M",
                "parallel.pipeline_schedule=zbv",
                "parallel.stages_per_rank=2",
                "batch.micro_batch_size=1",
            ],
            "parallel.pipeline_schedule",
            "multi-token prediction",
        ),
        (["parallel.stages_per_rank=2"], "parallel.stages_per_rank", "one stage per rank"),
        (["parallel.pipeline_schedule=2f2b"], "parallel.pipeline_schedule", "must be one of"),
    ],
)
def test_a_violated_rule_names_its_key(overrides, key, words):
    assert words in load_problems(*TINY, *overrides)[key].rule


def test_a_layout_that_fits_has_no_problem():
    composed(*TINY)
    composed(*TINY, "model.pattern=M*|-M-")
    composed("experiment=tiny", "model.pattern=M*|-M-")  # a single process does not mind


def test_a_faulty_pattern_is_reported_once():
    assert "must be known" in load_problems(*TINY, "model.pattern=MX")["model.pattern"].rule


def test_stages_are_balanced_where_there_are_some_to_balance():
    time = StageBalance.time
    (problem,) = problems_of(lambda: replace(ROOT.parallel, stage_balance=time))
    assert problem.key == "stage_balance"
    pipeline = ("parallel.pp_degree=2", "parallel.stage_balance=time", "experiment=tiny")
    assert composed(*pipeline, "model.pattern=M*-M").parallel.stage_balance is time
    assert list(load_problems(*pipeline, "model.pattern=M*|-M")) == ["parallel.stage_balance"]
