import pytest
import torch

from nvfp4_train.numerics.kernels import native
from nvfp4_train.numerics.random import RandomStream, random_bytes, stream_key
from tests.support import oracle

KEY = 0x0123456789ABCDEF
PINNED_KEY = 0x82EA10D5FEB2B3B5
PINNED_BYTES = [[133, 22, 72, 103, 54, 242, 113, 84], [205, 18, 28, 229, 0, 79, 150, 114]]
PINNED_FAR_BYTES = [[243, 3, 9, 196, 44, 47, 41, 188]]


def test_pinned_values():
    """A change here changes every run with stochastic rounding; it must be deliberate."""
    assert stream_key(seed=1, layer="blocks.0.mixer.in_proj", operand="dgrad.dy", step=7) == PINNED_KEY
    assert random_bytes(RandomStream(KEY), 2, 8).tolist() == PINNED_BYTES
    assert random_bytes(RandomStream(2**64 - 1, 10**12, 4 * 10**9), 1, 8).tolist() == PINNED_FAR_BYTES


def test_the_hash_agrees_with_python_integers():
    stream = RandomStream(KEY, row_offset=5, column_offset=8)
    expected = [[oracle.random_byte(KEY, 5 + row, 8 + column) for column in range(11)] for row in range(6)]
    assert random_bytes(stream, 6, 11).tolist() == expected


@pytest.mark.parametrize("key", [0, 1, KEY, 2**63, 2**64 - 1])
def test_compiled_bytes_are_the_same(key: int):
    stream = RandomStream(key, row_offset=2**40, column_offset=4 * 123)
    assert torch.equal(native.random_bytes(stream, 5, 1500), random_bytes(stream, 5, 1500))


def test_shards_get_the_bytes_of_the_whole():
    whole = random_bytes(RandomStream(KEY), 32, 64)
    for row, column in ((0, 32), (16, 0), (16, 32), (3, 4)):
        shard = random_bytes(RandomStream(KEY, row_offset=row, column_offset=column), 16, 32)
        assert torch.equal(shard, whole[row : row + 16, column : column + 32])


def local_indices(offset: int, segment: int, stride: int, count: int) -> list[int]:
    """Global indices of the first `count` local ones."""
    return [offset + local // segment * stride + local % segment for local in range(count)]


@pytest.mark.parametrize(("segment", "stride"), [(16, 64), (32, 32), (48, 100)])
@pytest.mark.parametrize("offset", [0, 16])
def test_segments_get_the_rows_and_columns_of_the_whole(segment: int, stride: int, offset: int):
    whole = random_bytes(RandomStream(KEY, row_offset=4), 500, 500)
    here = local_indices(offset, segment, stride, 96)
    along_rows = RandomStream(KEY, row_offset=4 + offset, row_segment=segment, row_stride=stride)
    along_columns = RandomStream(KEY, row_offset=4, column_offset=offset, column_segment=segment, column_stride=stride)
    for draw in (random_bytes, native.random_bytes):
        assert torch.equal(draw(along_rows, 96, 500), whole[here])
        assert torch.equal(draw(along_columns, 500, 96), whole[:, here])


def test_short_segments_of_columns_in_wide_rows():
    """The kernel draws 512 columns at a time, here with segments of one word."""
    stream = RandomStream(KEY, column_segment=4, column_stride=12)
    here = local_indices(0, 4, 12, 1030)
    expected = random_bytes(RandomStream(KEY), 3, here[-1] + 1)[:, here]
    assert torch.equal(random_bytes(stream, 3, 1030), expected)
    assert torch.equal(native.random_bytes(stream, 3, 1030), expected)


def test_bytes_are_uniform():
    counts = torch.bincount(random_bytes(RandomStream(KEY), 512, 512).flatten().long(), minlength=256).double()
    expected = counts.sum() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 255) < 4 * (2 * 255) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item()


@pytest.mark.parametrize("change", [{"seed": 1}, {"layer": "b"}, {"operand": "wgrad.dy"}, {"step": 1}])
def test_other_streams_are_independent(change: dict[str, object]):
    base = {"seed": 0, "layer": "a", "operand": "dgrad.dy", "step": 0}
    first, second = (random_bytes(RandomStream(stream_key(**fields)), 128, 128) for fields in (base, base | change))
    assert abs(correlation(first, second)) < 4 / 128


def test_neighbours_are_independent():
    x = random_bytes(RandomStream(KEY), 256, 256)
    for rows, columns in ((1, 0), (2, 0), (16, 0), (0, 1), (0, 2), (0, 4), (1, 4), (16, 16)):
        a, b = x[: 256 - rows, : 256 - columns], x[rows:, columns:]
        assert abs(correlation(a, b)) < 4 / a.numel() ** 0.5, (rows, columns)


def test_no_two_rows_share_words():
    """With one key half only, rows whose keys are close would hold each other's words, shifted."""
    words = random_bytes(RandomStream(KEY), 2048, 512).view(torch.int32)
    duplicates = words.numel() - words.unique().numel()
    assert duplicates < 2 * words.numel() ** 2 / 2**33 + 10


@pytest.mark.parametrize(("offsets", "message"), [((-1, 0), "negative"), ((0, 6), "multiple of 4")])
def test_bad_offsets_are_refused(offsets: tuple[int, int], message: str):
    with pytest.raises(ValueError, match=message):
        RandomStream(KEY, *offsets)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ({"row_segment": 8, "row_stride": 64}, "row_segment must be a positive multiple of 16, found 8"),
        ({"row_segment": -16, "row_stride": 64}, "row_segment must be a positive multiple of 16, found -16"),
        ({"row_segment": 32}, "row_stride must be at least row_segment = 32, found 0"),
        ({"row_segment": 32, "row_stride": 31}, "row_stride must be at least row_segment = 32, found 31"),
        ({"row_stride": 64}, "row_segment must be a positive multiple of 16, found 0"),
        ({"column_segment": 6, "column_stride": 64}, "column_segment must be a positive multiple of 4, found 6"),
        ({"column_segment": 8, "column_stride": 10}, "column_segment = 8 and a multiple of 4, found 10"),
    ],
)
def test_bad_segments_are_refused(segments: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        RandomStream(KEY, **segments)
