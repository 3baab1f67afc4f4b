import struct
from pathlib import Path

import numpy as np
import pytest

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import HEADER, MAGIC, IndexedTokens, token_dtype
from tests.support.token_files import GOLDEN_PAIRS, write_pair


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_pair(tmp_path / "pair", [[1, 2, 3], [], [4, 5]])
    return tmp_path / "pair"


def index(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def data(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def overwrite(path: Path, offset: int, raw: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(raw)] = raw
    path.write_bytes(content)


def test_reads_sequences_and_documents(prefix):
    pair = IndexedTokens(prefix)
    assert (pair.num_tokens, pair.num_sequences, pair.num_documents) == (5, 3, 3)
    assert [pair.document(i).tolist() for i in range(3)] == [[1, 2, 3], [], [4, 5]]
    assert pair.sequence(2).tolist() == [4, 5]
    assert pair.document_starts().tolist() == [0, 3, 3, 5]
    assert pair.modes is None


def test_reads_ranges_and_documents_in_a_row(prefix, monkeypatch):
    pair = IndexedTokens(prefix)
    assert pair.read(1, 3).tolist() == [2, 3, 4]
    monkeypatch.setattr("nvfp4_train.data.indexed._CHUNK", 2)
    assert [document.tolist() for document in pair.documents()] == [[1, 2, 3], [], [4, 5]]
    assert [document.tolist() for document in pair.documents(first=2)] == [[4, 5]]


@pytest.mark.parametrize("name", ["docsA_uint16", "multi_seq_modes_int32"])
def test_document_starts_are_the_same_from_the_file_and_in_memory(name):
    pair = IndexedTokens(GOLDEN_PAIRS / name)
    starts = pair.document_starts()
    assert starts[-1] == pair.num_tokens
    for first, last in ((0, pair.num_documents + 1), (3, 9), (pair.num_documents, pair.num_documents + 1), (4, 4)):
        assert np.array_equal(pair.document_starts_between(first, last), starts[first:last])
    assert pair.single_sequence is (name == "docsA_uint16")


def test_tokens_cannot_be_changed(prefix):
    with pytest.raises(ValueError, match="read-only"):
        IndexedTokens(prefix).tokens[0] = 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_damage_is_found_in_every_piece(tmp_path, chunk, monkeypatch):
    monkeypatch.setattr("nvfp4_train.data.indexed._CHUNK", chunk)
    for sequence in range(4):
        prefix = tmp_path / str(sequence)
        write_pair(prefix, [[1], [2, 3], [], [4]])
        overwrite(index(prefix), HEADER.size + 4 * 4 + 8 * sequence, struct.pack("<q", 99))
        with pytest.raises(DataError, match=f"pointer 99 of sequence {sequence}"):
            IndexedTokens(prefix)
        write_pair(prefix, [[1], [2, 3], [], [4]])
        overwrite(index(prefix), HEADER.size + 4 * sequence, struct.pack("<i", -1))
        with pytest.raises(DataError, match=f"length -1 of sequence {sequence}"):
            IndexedTokens(prefix)
        write_pair(prefix, [[1], [2, 3], [], [4]])
        overwrite(index(prefix), HEADER.size + 4 * 12 + 8 * (sequence + 1), struct.pack("<q", -1))
        with pytest.raises(DataError, match="document boundaries"):
            IndexedTokens(prefix)


def test_reads_golden_pair_of_several_sequences_a_document_with_modes():
    pair = IndexedTokens(GOLDEN_PAIRS / "multi_seq_modes_int32")
    assert pair.dtype == np.int32
    assert pair.num_documents == 12
    assert len(pair.modes) == pair.num_sequences
    joined = np.concatenate([pair.document(i) for i in range(pair.num_documents)])
    assert np.array_equal(joined, pair.tokens)
    per_document = np.diff(pair.document_indices)
    assert per_document.min() == 0
    assert per_document.max() == 3


def test_documents_end_with_the_end_of_document_token_in_the_golden_pair():
    pair = IndexedTokens(GOLDEN_PAIRS / "docsA_uint16")
    assert (pair.num_documents, pair.num_tokens) == (200, 19144)
    assert all(pair.document(i)[-1] == 2 for i in range(200))


@pytest.mark.parametrize(("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (131072, "int32")])
def test_token_dtype_follows_megatron(vocab_size, name):
    assert token_dtype(vocab_size).name == name


def corrupt_missing_index(prefix):
    index(prefix).unlink()


def corrupt_empty_index(prefix):
    index(prefix).write_bytes(b"")


def corrupt_short_header(prefix):
    index(prefix).write_bytes(MAGIC)


def corrupt_magic(prefix):
    overwrite(index(prefix), 0, b"NOTANIDX!")


def corrupt_version(prefix):
    overwrite(index(prefix), 9, struct.pack("<Q", 2))


def corrupt_dtype(prefix):
    overwrite(index(prefix), 17, b"\x09")


def corrupt_no_boundary(prefix):
    overwrite(index(prefix), 26, struct.pack("<Q", 0))


def corrupt_truncated_index(prefix):
    index(prefix).write_bytes(index(prefix).read_bytes()[:-1])


def corrupt_huge_count(prefix):
    overwrite(index(prefix), 18, struct.pack("<Q", 1 << 60))


def corrupt_negative_length(prefix):
    overwrite(index(prefix), HEADER.size, struct.pack("<i", -3))


def corrupt_pointer(prefix):
    overwrite(index(prefix), HEADER.size + 3 * 4 + 8, struct.pack("<q", 7))


def corrupt_boundaries(prefix):
    overwrite(index(prefix), HEADER.size + 3 * 12 + 8, struct.pack("<q", 3))


def corrupt_last_boundary(prefix):
    overwrite(index(prefix), HEADER.size + 3 * 12 + 3 * 8, struct.pack("<q", 2))


def corrupt_missing_data(prefix):
    data(prefix).unlink()


def corrupt_empty_data(prefix):
    data(prefix).write_bytes(b"")


def corrupt_truncated_data(prefix):
    data(prefix).write_bytes(data(prefix).read_bytes()[:-1])


def corrupt_foreign_data(prefix):
    data(prefix).write_bytes((GOLDEN_PAIRS / "docsA2_uint16.bin").read_bytes())


@pytest.mark.parametrize(
    ("corrupt", "ending", "words"),
    [
        (corrupt_missing_index, ".idx", "no file"),
        (corrupt_empty_index, ".idx", "an empty file"),
        (corrupt_short_header, ".idx", "9 bytes"),
        (corrupt_magic, ".idx", "NOTANIDX"),
        (corrupt_version, ".idx", "version 2"),
        (corrupt_dtype, ".idx", "dtype code 9"),
        (corrupt_no_boundary, ".idx", "no document boundary"),
        (corrupt_truncated_index, ".idx", "for 3 sequences and 3 documents"),
        (corrupt_huge_count, ".idx", "bytes"),
        (corrupt_negative_length, ".idx", "length -3 of sequence 0"),
        (corrupt_pointer, ".idx", "pointer 7 of sequence 1"),
        (corrupt_boundaries, ".idx", "boundaries"),
        (corrupt_last_boundary, ".idx", "boundaries from 0 to 2"),
        (corrupt_missing_data, ".bin", "no file"),
        (corrupt_empty_data, ".bin", "0 bytes"),
        (corrupt_truncated_data, ".bin", "9 bytes: a truncated file"),
        (corrupt_foreign_data, ".bin", "too long"),
    ],
)
def test_every_damage_is_one_error_that_names_the_file(prefix, corrupt, ending, words):
    corrupt(prefix)
    with pytest.raises(DataError) as caught:
        IndexedTokens(prefix)
    assert caught.value.path == f"{prefix}{ending}"
    assert words in str(caught.value)
    assert caught.value.fix


def test_index_of_another_pair_is_refused(tmp_path):
    for ending, source in ((".idx", "docsA_uint16"), (".bin", "docsB_int32")):
        (tmp_path / f"mixed{ending}").write_bytes((GOLDEN_PAIRS / f"{source}{ending}").read_bytes())
    with pytest.raises(DataError, match=r"another \.idx"):
        IndexedTokens(tmp_path / "mixed")


def test_pair_of_empty_documents_has_no_tokens(tmp_path):
    pair = write_pair(tmp_path / "empty", [[], []])
    assert (pair.num_documents, pair.num_tokens) == (2, 0)
