"""Where a run stands in its data, in numbers that know nothing of ranks and batches, and whether it can go on there."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from nvfp4_train.data.stream import MixedStream, Origin


def stream_fingerprint(stream: MixedStream) -> str:
    """Return a hash of what the sources of a stream give, in their order."""
    parts = sorted((feed.name, feed.fingerprint) for feed in stream.feeds)
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def describe_state(stream: MixedStream, *, position: int) -> dict[str, object]:
    """Return what a checkpoint keeps at a position of the stream: a cursor in tokens, and a fingerprint, per source."""
    given, length = stream.given(position), stream.sequence_length
    return {
        "fingerprint": stream_fingerprint(stream),
        "sequence_length": length,
        "origin": {
            "tokens": stream.origin.tokens,
            "sources": {name: count * length for name, count in stream.origin.given.items()},
        },
        "sources": {
            feed.name: {"fingerprint": feed.fingerprint, "tokens": given[feed.name] * length} for feed in stream.feeds
        },
    }


def find_changes(stream: MixedStream, saved: Mapping[str, Any], *, position: int) -> list[str]:
    """Return why a run cannot read on in ``stream`` exactly where it stopped; nothing where it can.

    It can where every source gives what it gave, and the plan from the saved origin has taken from each source what the
    run took: then the tokens read so far are those that this stream would have given, whatever the ranks and batches
    were, and what follows neither repeats nor skips one. What the plan says of the future may have changed.

    Args:
        stream: What the run would read now.
        saved: What ``describe_state`` returned.
        position: Position at which the run stopped.
    """
    before, now = saved["sources"], {feed.name: feed for feed in stream.feeds}
    changes = []
    for name, source in before.items():
        if source["tokens"] and name not in now:
            changes.append(f"source {name}: {source['tokens']:,} tokens were read from it, and it is gone")
        elif source["tokens"] and now[name].fingerprint != source["fingerprint"]:
            changes.append(
                f"source {name}: its fingerprint was {source['fingerprint']} and is {now[name].fingerprint} "
                "(content, packing, order, seed or sequence length)"
            )
    if changes:
        return changes
    stream.begin(_saved_origin(saved))
    for name, count in stream.given(position).items():
        tokens, read = count * stream.sequence_length, before.get(name, {"tokens": 0})["tokens"]
        if tokens != read:
            changes.append(f"source {name}: {read:,} tokens were read, and this blend would have read {tokens:,}")
    return changes


def begin_phase(stream: MixedStream, saved: Mapping[str, Any], *, tokens: int) -> dict[str, int]:
    """Let position 0 of the stream be here; sources that are the same go on, the others start at their beginning.

    Args:
        stream: What the run reads from here on.
        saved: What ``describe_state`` returned.
        tokens: Tokens of the run so far.

    Returns:
        Tokens that have been read from each source.
    """
    given = {}
    for feed in stream.feeds:
        source = saved["sources"].get(feed.name)
        if source is not None and source["fingerprint"] == feed.fingerprint:
            given[feed.name] = source["tokens"] // stream.sequence_length
    stream.begin(Origin(tokens=tokens, given=given))
    return {feed.name: given.get(feed.name, 0) * stream.sequence_length for feed in stream.feeds}


def _saved_origin(saved: Mapping[str, Any]) -> Origin:
    length = saved["sequence_length"]
    given = {name: tokens // length for name, tokens in saved["origin"]["sources"].items()}
    return Origin(tokens=saved["origin"]["tokens"], given=given)
