"""How fast a run reads its data: `python benchmarks/data_stream.py`, one process, hot cache.

Each row is the best of several rounds, beside the time of copying the same tokens to int64 and nothing else. On a
machine that others use too, the ratios and the tokens per second of CPU time say more than the wall clock.
"""

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nvfp4_train.data.best_fit import BestFitTokens, build_best_fit
from nvfp4_train.data.fim import FimRule, FimTokens
from nvfp4_train.data.fingerprint import pairs_fingerprint
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.indexed_writer import IndexedWriter
from nvfp4_train.data.mixture import Blend
from nvfp4_train.data.order import PrefixStableOrder
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.plan import UNLIMITED, Phase, Plan
from nvfp4_train.data.rows import Samples
from nvfp4_train.data.source import SourceTokens
from nvfp4_train.data.stream import Feed, MixedStream, SequenceStream

LENGTH = 4096
VOCAB_SIZE = 32_000
MICRO_BATCH = 8
WEIGHTS = (0.5, 0.2, 0.15, 0.1, 0.05)

Results = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is read.

    Args:
        rounds: How often everything is timed.
        rows: That a round reads.
        documents: Of the corpus that the rows come from, of 2 to 1600 tokens.
        many_documents: Of the corpus that is opened, of 8 tokens.
    """

    rounds: int
    rows: int
    documents: int
    many_documents: int


FULL = Sizes(rounds=7, rows=1024, documents=50_000, many_documents=5_000_000)
QUICK = Sizes(rounds=1, rows=16, documents=500, many_documents=50_000)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of the fastest round."""

    wall: float
    cpu: float


def fastest(action: Callable[[], object], *, rounds: int) -> Timing:
    """Run an action several times."""
    found = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return Timing(wall=min(wall for wall, _ in found), cpu=min(cpu for _, cpu in found))


def write_corpus(prefix: Path, *, documents: int) -> IndexedTokens:
    """Write documents of 2 to 1600 tokens."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, dtype=np.dtype("<u2")) as writer:
        for size in rng.integers(2, 1600, size=documents).tolist():
            writer.add_document(rng.integers(0, VOCAB_SIZE, size=size, dtype=np.uint16))
    return IndexedTokens(prefix)


def write_many_documents(prefix: Path, *, documents: int) -> None:
    """Write documents of 8 tokens."""
    document = np.arange(8, dtype=np.uint16)
    with IndexedWriter(prefix, dtype=np.dtype("<u2")) as writer:
        for _ in range(documents):
            writer.add_document(document)


def open_and_read(prefix: Path) -> None:
    """Open a source as a run does, fingerprint included, and read one row from its middle."""
    pairs = [IndexedTokens(prefix)]
    pairs_fingerprint(pairs)
    packed = PackedTokens(SourceTokens(pairs), sequence_length=LENGTH, vocab_size=VOCAB_SIZE)
    shuffled(packed).read(123_456, 1)


def shuffled(samples: Samples, seed: int = 1) -> SequenceStream:
    """Return the samples in random order."""
    return SequenceStream(samples, order=PrefixStableOrder(num_samples=samples.num_samples, seed=seed))


def blend(samples: Samples) -> MixedStream:
    """Return five sources in one blend."""
    feeds = [
        Feed(
            name=str(number),
            samples=samples,
            order=PrefixStableOrder(num_samples=samples.num_samples, seed=number),
            samples_per_epoch=samples.num_samples,
            fingerprint="",
        )
        for number in range(len(WEIGHTS))
    ]
    phases = [Phase(name="run", end=None, weights=WEIGHTS)]
    unlimited = [UNLIMITED] * len(WEIGHTS)
    return MixedStream(feeds, plan=lambda _: Plan(phases, given=[0] * len(WEIGHTS), limits=unlimited))


def read_all(stream: SequenceStream | MixedStream, *, rows: int, batch: int) -> None:
    """Read rows in batches, with labels, document ids and positions."""
    for first in range(0, rows, batch):
        stream.read(first, batch)


def print_row(name: str, timing: Timing, *, copy: Timing, rows: int) -> dict[str, float]:
    """Print one row of the table of reading speeds, and return it."""
    tokens = rows * LENGTH / 1e6
    wall, cpu, ratio = tokens / timing.wall, tokens / timing.cpu, timing.cpu / copy.cpu
    print(f"{name:<44} {wall:8.0f} M/s {cpu:8.0f} M/s {ratio:8.1f} x")
    return {"million_tokens_per_second": wall, "million_tokens_per_cpu_second": cpu, "times_a_copy": ratio}


def reading(source: SourceTokens, folder: Path, sizes: Sizes) -> Results:
    """Measure random rows of 4096 tokens."""
    concatenated = PackedTokens(source, sequence_length=LENGTH, vocab_size=VOCAB_SIZE)
    rule = FimRule(rate=0.5, spm_rate=0.5, prefix=1, middle=2, suffix=3, document_end=None, seed="benchmark")
    fim = PackedTokens(FimTokens(source, rule=rule), sequence_length=LENGTH, vocab_size=VOCAB_SIZE)
    table = build_best_fit(source, sequence_length=LENGTH, fingerprint="benchmark", cache_dir=folder)
    fitted = BestFitTokens(source, sequence_length=LENGTH, vocab_size=VOCAB_SIZE, pad_token=0, table=table)
    starts = np.random.default_rng(1).permutation(source.num_tokens // LENGTH)[: sizes.rows].tolist()

    def copy_rows() -> None:
        for row in starts:
            source.read(row * LENGTH, (row + 1) * LENGTH).astype(np.int64)

    copy = fastest(copy_rows, rounds=sizes.rounds)
    print(f"{'random rows of 4096 tokens':<44} {'wall':>12} {'CPU time':>12} {'against copy':>10}")
    results = {"copy": print_row("copying tokens to int64, nothing else", copy, copy=copy, rows=len(starts))}
    cases: dict[str, tuple[SequenceStream | MixedStream, int]] = {
        "one source, batches of 1": (shuffled(concatenated), 1),
        f"one source, batches of {MICRO_BATCH}": (shuffled(concatenated), MICRO_BATCH),
        f"five sources, batches of {MICRO_BATCH}": (blend(concatenated), MICRO_BATCH),
        f"best fit, batches of {MICRO_BATCH}": (shuffled(fitted), MICRO_BATCH),
        f"fill in the middle, batches of {MICRO_BATCH}": (shuffled(fim), MICRO_BATCH),
    }
    for name, (stream, batch) in cases.items():
        timing = fastest(partial(read_all, stream, rows=sizes.rows, batch=batch), rounds=sizes.rounds)
        results[name] = print_row(name, timing, copy=copy, rows=sizes.rows)
    used = (source.num_tokens - source.num_documents) / (fitted.num_samples * LENGTH)  # a last token takes no column
    print(f"best fit: {100 * (1 - used):.2f} % padding")
    results["best fit"] = {"padding": 1 - used}
    return results


def positions(sizes: Sizes) -> Results:
    """Measure the blend far into a run, and what it keeps in memory."""
    five = Blend(WEIGHTS)
    timings = [fastest(partial(five.picks, first, LENGTH), rounds=sizes.rounds) for first in (0, 10**12)]
    near, far = (1e9 * timing.cpu / LENGTH for timing in timings)
    print(f"blend, per sample: {near:.0f} ns at sample 0, {far:.0f} ns at 10^12")
    tracemalloc.start()
    plan = Plan([Phase(name="run", end=None, weights=WEIGHTS)], given=[0] * 5, limits=[UNLIMITED] * 5)
    plan.picks(10**12, LENGTH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"memory of a plan of 10^12 samples, its work space included: {peak / 1e6:.2f} MB")
    return {"blend": {"near_ns_per_sample": near, "far_ns_per_sample": far, "peak_bytes": peak}}


def opening(prefix: Path, sizes: Sizes) -> Results:
    """Measure opening many documents."""
    write_many_documents(prefix, documents=sizes.many_documents)
    timing = fastest(partial(open_and_read, prefix), rounds=sizes.rounds)
    what = f"opening {sizes.many_documents:,} documents, fingerprint and first row"
    print(f"{what}: {timing.wall:.3f} s wall, {timing.cpu:.3f} s CPU")
    return {"opening": {"seconds": timing.wall, "cpu_seconds": timing.cpu}}


def main() -> None:
    """Print all rows, and write them as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one round: whether it runs, not how fast")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "corpus", documents=sizes.documents)
        results = reading(SourceTokens([corpus]), folder, sizes)
        results |= opening(folder / "many", sizes)
        results |= positions(sizes)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
