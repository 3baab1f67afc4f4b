import numpy as np

from nvfp4_train.data.fingerprint import combined_fingerprint, pairs_fingerprint
from nvfp4_train.data.indexed import IndexedTokens
from tests.support.token_files import write_pair

LONG = np.random.default_rng(0).integers(0, 1000, size=(50, 20_000)).tolist()


def test_moved_data_are_the_same(tmp_path):
    first = write_pair(tmp_path / "a", [[1, 2], [3]])
    (tmp_path / "elsewhere").mkdir()
    for ending in ("bin", "idx"):
        (tmp_path / "elsewhere" / f"b.{ending}").write_bytes((tmp_path / f"a.{ending}").read_bytes())
    assert pairs_fingerprint([first]) == pairs_fingerprint([IndexedTokens(tmp_path / "elsewhere" / "b")])


def test_other_tokens_borders_or_order_are_other_data(tmp_path):
    documents = {"a": [[1, 2], [3]], "tokens": [[1, 2], [4]], "borders": [[1], [2, 3]], "empty": [[1, 2], [3], []]}
    pairs = {name: write_pair(tmp_path / name, content) for name, content in documents.items()}
    found = {pairs_fingerprint([pair]) for pair in pairs.values()}
    found |= {pairs_fingerprint([pairs["a"], pairs["tokens"]]), pairs_fingerprint([pairs["tokens"], pairs["a"]])}
    assert len(found) == 6


def test_large_files_made_again_from_other_text_differ(tmp_path):
    # Same size and same document lengths: only the content says so.
    pairs = [write_pair(tmp_path / "a", LONG), write_pair(tmp_path / "b", LONG[::-1])]
    assert pairs[0].data_path.stat().st_size > 64 * 4096
    assert pairs_fingerprint(pairs[:1]) != pairs_fingerprint(pairs[1:])


def test_the_last_bytes_count(tmp_path):
    pair = write_pair(tmp_path / "a", LONG)
    before = pairs_fingerprint([pair])
    content = bytearray(pair.data_path.read_bytes())
    content[-2] ^= 1
    pair.data_path.write_bytes(content)
    assert pairs_fingerprint([pair]) != before


def test_combined_values_keep_their_order():
    assert combined_fingerprint(1, "a") == combined_fingerprint(1, "a")
    assert len({combined_fingerprint(1, "a"), combined_fingerprint("a", 1), combined_fingerprint("1a")}) == 3
