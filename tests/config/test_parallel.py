from dataclasses import fields, replace

import pytest

from nvfp4_train.config.parallel import ActivationCheckpoint, Compile
from nvfp4_train.config.pipeline import PipelineSchedule
from tests.support.configs import composed, load_problems, problems_of

VALID = composed().parallel


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pipeline_schedule": PipelineSchedule.zero_bubble}, "pipeline_schedule"),
        ({"pp_degree": 0}, "pp_degree"),
        ({"stages_per_rank": 0, "pp_degree": 2, "pipeline_schedule": PipelineSchedule.zero_bubble}, "stages_per_rank"),
        ({"dp_replicate_degree": 0}, "dp_replicate_degree"),
        ({"dp_shard_degree": 0}, "dp_shard_degree"),
        ({"dp_shard_degree": -2}, "dp_shard_degree"),
        (
            {"activation_checkpoint": ActivationCheckpoint.selective, "compile": Compile.block},
            "activation_checkpoint",
        ),
    ],
)
def test_a_violated_rule_names_its_key(changes, key):
    assert [problem.key for problem in problems_of(lambda: replace(VALID, **changes))] == [key]


@pytest.mark.parametrize("degree", [field.name for field in fields(VALID) if field.name.endswith("_degree")])
@pytest.mark.parametrize("value", [0, -2])
def test_rules_of_other_groups_leave_a_degree_below_1_to_its_own(degree, value):
    layout = ("parallel.pp_degree=2", "parallel.dp_shard_degree=2", "model.pattern=ME*-")
    found = load_problems("experiment=tiny", *layout, "batch.global_batch_size=16", f"parallel.{degree}={value}")
    assert list(found) == [f"parallel.{degree}"]
