import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.indexed_writer import IndexedWriter
from tests.support.token_files import GOLDEN_PAIRS, write_pair

PAIRS = ("docsA_uint16", "docsA2_uint16", "docsB_int32", "multi_seq_modes_int32", "merged_A_A2_uint16")


def assert_equals_golden(prefix: Path, name: str) -> None:
    for ending in (".bin", ".idx"):
        written = prefix.with_name(prefix.name + ending).read_bytes()
        assert written == (GOLDEN_PAIRS / f"{name}{ending}").read_bytes()


@pytest.mark.parametrize("name", PAIRS)
def test_writes_what_megatron_wrote(tmp_path, name):
    golden = IndexedTokens(GOLDEN_PAIRS / name)
    with IndexedWriter(tmp_path / "out", dtype=golden.dtype, has_modes=golden.modes is not None) as writer:
        for document in range(golden.num_documents):
            first, last = golden.document_indices[document : document + 2]
            for sequence in range(first, last):
                mode = 0 if golden.modes is None else int(golden.modes[sequence])
                writer.add_sequence(golden.sequence(sequence), mode=mode)
            writer.end_document()
    assert_equals_golden(tmp_path / "out", name)


def test_appending_gives_megatrons_merge(tmp_path):
    with IndexedWriter(tmp_path / "merged", dtype=np.dtype("<u2")) as writer:
        writer.append(GOLDEN_PAIRS / "docsA_uint16")
        writer.append(GOLDEN_PAIRS / "docsA2_uint16")
    assert_equals_golden(tmp_path / "merged", "merged_A_A2_uint16")


def test_appending_keeps_modes_and_empty_documents(tmp_path):
    name = "multi_seq_modes_int32"
    with IndexedWriter(tmp_path / "out", dtype=np.dtype("<i4"), has_modes=True) as writer:
        writer.append(GOLDEN_PAIRS / name)
    assert_equals_golden(tmp_path / "out", name)


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), max_size=8),
    dtype=st.sampled_from(["<u2", "<i4", "<i8"]),
)
def test_what_is_written_is_read(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("pair") / "out"
    with IndexedWriter(prefix, dtype=np.dtype(dtype)) as writer:
        for sequences in documents:
            for sequence in sequences:
                writer.add_sequence(sequence)
            writer.end_document()
    pair = IndexedTokens(prefix)
    assert pair.num_documents == len(documents)
    for index, sequences in enumerate(documents):
        assert pair.document(index).tolist() == [token for sequence in sequences for token in sequence]
    assert pair.lengths.tolist() == [len(sequence) for sequences in documents for sequence in sequences]


def test_pointers_are_right_beyond_one_chunk_of_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr("nvfp4_train.data.indexed_writer._CHUNK_ENTRIES", 3)
    documents = [[7] * length for length in (1, 2, 0, 4, 5, 1, 3, 2)]
    pair = write_pair(tmp_path / "pair", documents)  # opening checks every pointer
    assert [pair.document(i).tolist() for i in range(len(documents))] == documents


def test_an_exception_leaves_no_file(tmp_path):
    def write_half():
        with IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2")) as writer:
            writer.add_document([1, 2])
            raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_rewriting_replaces_a_pair(tmp_path):
    write_pair(tmp_path / "pair", [[1, 2, 3]])
    assert write_pair(tmp_path / "pair", [[4]]).tokens.tolist() == [4]


@pytest.mark.parametrize("tokens", [[70000], [-1], [0.5]])
def test_tokens_that_do_not_fit_are_refused(tmp_path, tokens):
    with IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2")) as writer:
        with pytest.raises(ValueError, match="do not fit uint16"):
            writer.add_document(tokens)
        writer.add_document([1])
    assert IndexedTokens(tmp_path / "out").num_documents == 1


def test_many_documents_at_once_are_those_one_by_one(tmp_path):
    documents = [[1, 2], [], [3], [4, 5, 6]]
    write_pair(tmp_path / "one", documents)
    for dtype in ("<u2", "<i8"):
        with IndexedWriter(tmp_path / "many", dtype=np.dtype("<u2")) as writer:
            writer.add_documents(np.asarray([1, 2], dtype=dtype), np.asarray([2, 0]))
            writer.add_documents(np.asarray([3, 4, 5, 6], dtype=dtype), np.asarray([1, 3]))
        for ending in (".bin", ".idx"):
            assert (tmp_path / f"many{ending}").read_bytes() == (tmp_path / f"one{ending}").read_bytes()


@pytest.mark.parametrize("lengths", [[1], [2, 2], [4, -1]])
def test_lengths_that_do_not_add_up_are_refused(tmp_path, lengths):
    with (
        IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2")) as writer,
        pytest.raises(ValueError, match="lengths add up to"),
    ):
        writer.add_documents(np.arange(3), np.asarray(lengths))


def test_modes_that_cannot_be_written_are_refused(tmp_path):
    for has_modes, mode in ((True, 128), (True, -129), (False, 1)):
        with (
            IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2"), has_modes=has_modes) as writer,
            pytest.raises(ValueError, match=f"mode {mode}"),
        ):
            writer.add_sequence([1], mode=mode)


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("has_modes", [False, True])
def test_a_checkpoint_is_where_writing_goes_on(tmp_path, has_modes, finishes):
    def write(writer, numbers):
        for number in numbers:
            for _ in range(number % 3):
                writer.add_sequence(np.full(number, number), mode=number if has_modes else 0)
            writer.end_document()

    options = {"dtype": np.dtype("<u2"), "has_modes": has_modes}
    with IndexedWriter(tmp_path / "whole", **options) as writer:
        write(writer, range(9))
    with contextlib.ExitStack() as stack:
        if not finishes:
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        with IndexedWriter(tmp_path / "out", **options) as writer:
            write(writer, range(5))
            state = writer.checkpoint()
            write(writer, [100, 101, 102])
            if not finishes:
                raise KeyboardInterrupt
    assert (tmp_path / "out.idx").exists() is finishes
    with IndexedWriter(tmp_path / "out", **options, resume=state) as writer:
        write(writer, range(5, 9))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"out{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 4


def test_resuming_where_less_is_on_disk_is_refused(tmp_path):
    with (
        contextlib.suppress(KeyboardInterrupt),
        IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2")) as writer,
    ):
        writer.add_document([1, 2, 3])
        state = writer.checkpoint()
        raise KeyboardInterrupt
    (tmp_path / "out.bin.partial").write_bytes(b"\0\0")
    with pytest.raises(DataError, match="2 bytes"):
        IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2"), resume=state)


def test_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="uint32 cannot be written"):
        IndexedWriter(tmp_path / "out", dtype=np.dtype("<u4"))


def test_open_document_at_the_end_is_refused(tmp_path):
    writer = IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2"))
    writer.add_sequence([1])
    with pytest.raises(ValueError, match="end_document"):
        writer.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_append_refuses_another_dtype_and_missing_modes(tmp_path):
    with (
        IndexedWriter(tmp_path / "out", dtype=np.dtype("<u2")) as writer,
        pytest.raises(DataError, match="tokens of int32"),
    ):
        writer.append(GOLDEN_PAIRS / "docsB_int32")
    with IndexedWriter(tmp_path / "out", dtype=np.dtype("<i4")) as writer, pytest.raises(DataError, match="no modes"):
        writer.append(GOLDEN_PAIRS / "multi_seq_modes_int32")
