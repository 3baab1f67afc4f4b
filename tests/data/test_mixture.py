import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.mixture import Blend

weights_lists = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=6) | st.lists(
    st.integers(0, 5), min_size=1, max_size=6
).filter(any)


def greedy(weights: list[float], number: int) -> list[tuple[int, int]]:
    """The definition, sample by sample: the source with the smallest (count + 1/2) / weight, the first of equals."""
    shares = Blend(weights).weights
    counts, picked = [0] * len(weights), []
    for _ in range(number):
        times = [(count + 0.5) / share if share else np.inf for count, share in zip(counts, shares, strict=True)]
        source = int(np.argmin(times))
        picked.append((source, counts[source]))
        counts[source] += 1
    return picked


@settings(max_examples=60, deadline=None)
@given(weights=weights_lists, first=st.integers(0, 150), count=st.integers(0, 100))
def test_any_piece_is_a_piece_of_the_greedy_blend(weights, first, count):
    expected = greedy(weights, first + count)
    picks = Blend(weights).picks(first, count)
    assert list(zip(picks.sources.tolist(), picks.indices.tolist(), strict=True)) == expected[first:]


@settings(max_examples=60, deadline=None)
@given(weights=weights_lists, position=st.integers(0, 250))
def test_counts_and_positions_are_those_of_the_picks(weights, position):
    blend, expected = Blend(weights), greedy(weights, 251)
    before = [source for source, _ in expected[:position]]
    assert blend.counts(position).tolist() == np.bincount(before, minlength=len(weights)).tolist()
    assert blend.position_of(*expected[position]) == position


@settings(max_examples=30, deadline=None)
@given(weights=weights_lists)
def test_no_source_is_far_from_its_share(weights):
    blend = Blend(weights)
    for position in (1, 10, 1000, 10**6, 10**12):
        error = np.abs(blend.counts(position) - blend.weights * position)
        assert np.all(error <= 0.5 + len(weights) * blend.weights / 2 + 1e-15 * position)
        assert blend.counts(position).sum() == position


def test_a_source_without_weight_gives_nothing():
    picks = Blend([0, 2, 0, 1]).picks(0, 9)
    assert set(picks.sources.tolist()) == {1, 3}


def test_far_positions_cost_no_more_than_near_ones():
    # 10^15 samples: a list of them could not be made.
    picks = Blend([0.5, 0.3, 0.2]).picks(10**15, 10)
    assert np.bincount(picks.sources).tolist() == [5, 3, 2]
    assert np.all(np.abs(picks.indices - np.asarray([0.5, 0.3, 0.2])[picks.sources] * 10**15) < 10)


@pytest.mark.parametrize("scale", [1, 7, 0.001])
def test_only_ratios_of_weights_count(scale):
    one, other = (Blend([0.5 * factor, 0.25 * factor]).picks(0, 50) for factor in (1, scale))
    assert one.sources.tolist() == other.sources.tolist()
