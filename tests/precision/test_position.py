"""The position of a run."""

from nvfp4_train.precision.position import RoundingPosition


def test_a_microbatch_sets_where_it_is_and_leaves_the_weights_alone():
    position = RoundingPosition(seed=1, weight_version=4)
    position.start_microbatch(step=7, row_offset=1024)
    assert position == RoundingPosition(seed=1, step=7, row_offset=1024, weight_version=4)


def test_changed_weights_have_a_new_version_each_time():
    position = RoundingPosition(seed=1)
    position.weights_changed()
    position.weights_changed()
    assert position.weight_version == 2
