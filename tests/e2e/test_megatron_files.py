"""Token files cross between this program and Megatron Core, both ways."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.indexed_writer import IndexedWriter

pytestmark = pytest.mark.peer

DTYPES = ("u1", "<u2", "<i4", "<i8")
# Documents of several sequences, empty sequences and documents included.
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 255), max_size=6), max_size=3), min_size=1, max_size=8)
several = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def peer():
    """Their module; imported by the tests that need it, because that takes seconds."""
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="pip install --no-deps megatron-core")


def write_theirs(peer, prefix, documents, dtype):
    builder = peer.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write_ours(prefix, documents, dtype):
    with IndexedWriter(prefix, dtype=np.dtype(dtype)) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()


def files(prefix):
    return [prefix.with_name(prefix.name + ending).read_bytes() for ending in (".bin", ".idx")]


@several
@given(documents=DOCUMENTS, dtype=st.sampled_from(DTYPES))
def test_both_write_the_same_bytes(tmp_path_factory, peer, documents, dtype):
    folder = tmp_path_factory.mktemp("pair")
    write_theirs(peer, folder / "theirs", documents, dtype)
    write_ours(folder / "ours", documents, dtype)
    assert files(folder / "ours") == files(folder / "theirs")


@several
@given(documents=DOCUMENTS, dtype=st.sampled_from(DTYPES))
def test_we_read_what_they_wrote(tmp_path_factory, peer, documents, dtype):
    prefix = tmp_path_factory.mktemp("pair") / "theirs"
    write_theirs(peer, prefix, documents, dtype)
    pair = IndexedTokens(prefix)
    expected = [[token for sequence in document for token in sequence] for document in documents]
    assert [document.tolist() for document in pair.documents()] == expected


@several
@given(documents=DOCUMENTS, dtype=st.sampled_from(DTYPES))
def test_they_read_what_we_wrote(tmp_path_factory, peer, documents, dtype):
    prefix = tmp_path_factory.mktemp("pair") / "ours"
    sequences = [sequence for document in documents for sequence in document]
    if not any(sequences):
        sequences, documents = [[1]], [[[1]]]  # they cannot map an empty file
    write_ours(prefix, documents, dtype)
    theirs = peer.IndexedDataset(str(prefix))
    assert [theirs[index].tolist() for index in range(len(theirs))] == sequences
    assert theirs.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()


def test_both_append_alike(tmp_path, peer):
    rng = np.random.default_rng(0)
    builder = peer.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    with IndexedWriter(tmp_path / "ours", dtype=np.dtype("<u2")) as writer:
        for name in ("a", "b", "c"):
            documents = [
                [rng.integers(0, 65536, size=size).tolist() for size in rng.integers(0, 9, size=count)]
                for count in rng.integers(0, 4, size=30)
            ]
            write_ours(tmp_path / name, documents, "<u2")
            builder.add_index(str(tmp_path / name))
            writer.append(tmp_path / name)
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
