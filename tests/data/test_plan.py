import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.plan import UNLIMITED, Phase, Plan


def plan(*phases, given=None, limits=None):
    number = len(phases[0][1])
    return Plan(
        [Phase(name=f"p{index}", end=end, weights=weights) for index, (end, weights) in enumerate(phases)],
        given=given or [0] * number,
        limits=limits or [UNLIMITED] * number,
    )


def pairs(picks):
    return list(zip(picks.sources.tolist(), picks.indices.tolist(), strict=True))


def test_each_phase_has_its_blend_and_sources_go_on_where_they_were():
    three = plan((70, [0.9, 0.1, 0]), (90, [0.5, 0.5, 0]), (None, [0, 0.5, 0.5]))
    assert three.given(70).tolist() == [63, 7, 0]
    assert three.given(90).tolist() == [73, 17, 0]
    assert three.given(100).tolist() == [73, 22, 5]
    whole = pairs(three.picks(0, 100))
    for source in range(3):
        assert [index for chosen, index in whole if chosen == source] == list(range(three.given(100)[source]))


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(0, 120),
    count=st.integers(1, 60),
    ends=st.lists(st.integers(1, 100), min_size=0, max_size=3),
    limit=st.integers(1, 60),
)
def test_any_piece_is_a_piece_of_the_whole(first, count, ends, limit):
    blends = [[0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.1, 0.5, 0.4], [1, 1, 1]]
    phases = [*zip(sorted(ends), blends, strict=False), (None, [1, 1, 2])]
    some = plan(*phases, limits=[UNLIMITED, limit, 2 * limit])
    whole = pairs(some.picks(0, first + count))
    assert pairs(some.picks(first, count)) == whole[first:]
    assert some.given(first).tolist() == np.bincount([source for source, _ in whole[:first]], minlength=3).tolist()
    assert some.given(first + count)[1] <= limit
    # Whatever the blend, a source is read from its beginning without a gap.
    for source in range(3):
        indices = [index for chosen, index in whole if chosen == source]
        assert indices == list(range(len(indices)))


def test_the_others_share_what_an_exhausted_source_leaves():
    capped = plan((None, [0.5, 0.25, 0.25]), limits=[10, UNLIMITED, UNLIMITED])
    assert capped.given(1000).tolist() == [10, 495, 495]
    assert capped.end is None


def test_the_end_of_all_sources_is_known():
    capped = plan((None, [0.5, 0.5]), limits=[10, 25])
    assert capped.end == 35
    assert capped.given(35).tolist() == [10, 25]
    assert len(capped.picks(30, 5).sources) == 5
    with pytest.raises(IndexError, match="30 to 35 of a plan of 35"):
        capped.picks(30, 6)


def test_a_phase_whose_sources_are_spent_ends_the_plan():
    assert plan((50, [1, 0]), (None, [0, 1]), limits=[20, UNLIMITED]).end == 20


def test_sources_that_were_spent_before_give_nothing():
    spent = plan((None, [1, 1]), given=[10, 12], limits=[10, 10])
    assert spent.end == 0
    assert spent.given(0).tolist() == [10, 12]


def test_what_was_given_before_counts_against_the_limit():
    begun = plan((None, [1, 1]), given=[8, 100], limits=[10, UNLIMITED])
    assert pairs(begun.picks(0, 6)) == [(0, 8), (1, 100), (0, 9), (1, 101), (1, 102), (1, 103)]
    assert begun.given(0).tolist() == [8, 100]


def test_a_later_change_of_the_plan_changes_nothing_before_it():
    one = plan((40, [0.7, 0.3]), (None, [0.5, 0.5]))
    other = plan((40, [0.7, 0.3]), (60, [0.1, 0.9]), (None, [1, 0]))
    assert pairs(one.picks(0, 40)) == pairs(other.picks(0, 40))
