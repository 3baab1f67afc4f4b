import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.megatron_order import blend_index, build_indices, samples_of_source, split_bounds
from tests.support.token_files import GOLDEN_PAIRS

A, B = "docsA_uint16", "docsB_int32"
ONLY_TRAIN, BLEND = (100, 0, 0), (95, 5, 0)


def check(golden, name, *, pair, num_samples, split=ONLY_TRAIN, part=0, prefix="", **options):
    lengths = IndexedTokens(GOLDEN_PAIRS / pair).lengths
    first, last = split_bounds(split, len(lengths))[part]
    options = {"sequence_length": 64, "seed": 1234, "extra_token": True} | options
    built = build_indices(lengths[first:last], first=first, num_samples=num_samples, **options)
    for ours, theirs in (("documents", "document"), ("samples", "sample"), ("shuffle", "shuffle")):
        expected = golden[f"{prefix}{theirs}_index"]
        assert getattr(built, ours).dtype == expected.dtype, (name, theirs)
        assert np.array_equal(getattr(built, ours), expected), (name, theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("A_one_epoch_seq64", {"pair": A, "num_samples": None}),
        ("A_two_epochs_full_seq64", {"pair": A, "num_samples": 598}),
        ("A_two_epochs_part_seq64", {"pair": A, "num_samples": 448}),  # the last epoch is shuffled by itself
        ("A_no_extra_token_seq64", {"pair": A, "num_samples": 598, "extra_token": False}),
        ("A_split_90_8_2_train", {"pair": A, "num_samples": 300, "split": (90, 8, 2)}),
        ("A_split_90_8_2_valid", {"pair": A, "num_samples": 40, "split": (90, 8, 2), "part": 1}),
        ("A_split_90_8_2_test", {"pair": A, "num_samples": 10, "split": (90, 8, 2), "part": 2}),
        ("B_one_epoch_seq32_seed7", {"pair": B, "num_samples": None, "sequence_length": 32, "seed": 7}),
    ],
)
def test_indices_equal_megatrons(name, options):
    check(np.load(GOLDEN_PAIRS / f"{name}.npz"), name, **options)


@pytest.mark.parametrize(("part", "size"), [("train", 500), ("valid", 20)])
def test_a_blend_equals_megatrons(part, size):
    golden = np.load(GOLDEN_PAIRS / f"blend_A0.7_B0.3_{part}.npz")
    sources, indices = blend_index([0.7, 0.3], size)
    assert (sources.dtype, indices.dtype) == (np.int16, np.int64)
    assert np.array_equal(sources, golden["dataset_index"])
    assert np.array_equal(indices, golden["dataset_sample_index"])
    for source, (pair, weight) in enumerate(((A, 0.7), (B, 0.3))):
        wanted = samples_of_source(size, weight)
        place = 0 if part == "train" else 1
        check(golden, part, pair=pair, num_samples=wanted, split=BLEND, part=place, prefix=f"mid{source}.")


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(lambda some: sum(some) > 12),
    epochs=st.floats(0.1, 4),
    extra_token=st.booleans(),
)
def test_rows_of_the_sample_index_are_where_a_walk_gets_to(lengths, epochs, extra_token):
    per_epoch, length = sum(lengths), 5
    wanted = max(1, int(epochs * per_epoch / length))
    built = build_indices(
        np.asarray(lengths, dtype=np.int32),
        first=0,
        num_samples=wanted,
        sequence_length=length,
        seed=3,
        extra_token=extra_token,
    )
    assert len(built.shuffle) >= wanted
    assert sorted(built.shuffle.tolist()) == list(range(len(built.shuffle)))
    stream = [(entry, at) for entry, chosen in enumerate(built.documents.tolist()) for at in range(lengths[chosen])]
    for sample, (row, offset) in enumerate(built.samples.tolist()):
        place = sample * length
        if extra_token or sample == 0:
            walked = stream[place] if sample else (0, 0)
        else:
            entry, at = stream[place - 1]
            walked = (entry, at + 1)
        assert (row, offset) == walked


def test_splits_are_rounded_as_python_rounds():
    assert split_bounds((50, 50, 0), 5) == [(0, 2), (2, 5), (5, 5)]  # 2.5 to the even side
    assert split_bounds((969, 30, 1), 1000) == [(0, 969), (969, 999), (999, 1000)]
