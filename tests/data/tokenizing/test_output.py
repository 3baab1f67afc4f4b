import json

import numpy as np
import pytest

from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.manifest import file_digest
from nvfp4_train.data.tokenizing.output import ShardedOutput

LENGTHS = [3, 5, 1, 9, 2, 2, 2, 4, 7, 1]
TOKENS = np.arange(sum(LENGTHS), dtype="<u2")
STARTS = np.cumsum([0, *LENGTHS])


def output(folder, *, shard_tokens=8, names=("x",), state=None):
    folder.mkdir(exist_ok=True)
    return ShardedOutput(folder, names=list(names), dtype=np.dtype("<u2"), shard_tokens=shard_tokens, state=state)


def add(target, first, last, name="x"):
    target.add(name, TOKENS[STARTS[first] : STARTS[last]], np.asarray(LENGTHS[first:last]))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def written(folder):
    """What one call with all documents writes."""
    target = output(folder)
    add(target, 0, len(LENGTHS))
    shards = target.finish()["x"]
    return shards, contents(folder)


def test_shards_end_with_the_document_that_fills_them(tmp_path):
    shards, files = written(tmp_path / "a")
    assert [shard.num_tokens for shard in shards] == [8, 10, 10, 8]
    assert sum(shard.num_documents for shard in shards) == len(LENGTHS)
    assert [shard.name for shard in shards] == [f"x_{index:05}" for index in range(len(shards))]
    assert set(files) == {f"{shard.name}{ending}" for shard in shards for ending in (".bin", ".idx")}
    joined = [IndexedTokens(tmp_path / "a" / shard.name).tokens for shard in shards]
    assert np.array_equal(np.concatenate(joined), TOKENS)
    assert shards[0].bin_digest == file_digest(tmp_path / "a" / "x_00000.bin")


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_batches_do_not_show(tmp_path, step):
    _, expected = written(tmp_path / "a")
    target = output(tmp_path / "b")
    for first in range(0, len(LENGTHS), step):
        add(target, first, min(first + step, len(LENGTHS)))
    target.finish()
    assert contents(tmp_path / "b") == expected


@pytest.mark.parametrize("saved_after", range(len(LENGTHS) + 1))
@pytest.mark.parametrize("lost", [0, 1, 4])
@pytest.mark.parametrize("finishes", [False, True])
def test_every_checkpoint_continues(tmp_path, saved_after, lost, finishes):
    """Save after some documents, write some more that are lost or even finished, and go on from the saved state."""
    _, expected = written(tmp_path / "a")
    target = output(tmp_path / "b")
    add(target, 0, saved_after)
    state = json.loads(json.dumps(target.checkpoint()))
    add(target, saved_after, min(saved_after + lost, len(LENGTHS)))
    if finishes:
        target.finish()
    else:
        target.abandon(KeyboardInterrupt())
    again = output(tmp_path / "b", state=state)
    assert again.num_documents == saved_after
    add(again, saved_after, len(LENGTHS))
    again.finish()
    assert contents(tmp_path / "b") == expected


def test_one_pair_of_any_size(tmp_path):
    target = output(tmp_path / "a", shard_tokens=0)
    add(target, 0, 4)
    add(target, 4, 10)
    assert [shard.name for shard in target.finish()["x"]] == ["x"]
    assert (target.num_documents, target.num_tokens) == (10, 36)


def test_parts_are_apart(tmp_path):
    target = output(tmp_path / "a", shard_tokens=0, names=("x", "y", "z"))
    add(target, 0, 3)
    add(target, 3, 5, name="y")
    shards = target.finish()
    assert [shard.num_documents for shard in (*shards["x"], *shards["y"])] == [3, 2]
    assert shards["z"] == []


def test_failure_before_a_checkpoint_leaves_nothing(tmp_path):
    target = output(tmp_path / "a")
    add(target, 0, 1)
    target.abandon(ValueError())
    assert list((tmp_path / "a").iterdir()) == []
