"""How fast token files are written, opened and read: `python benchmarks/data.py`, one process, hot cache.

Each row is the best of several rounds, beside what cannot be avoided (writing the same bytes, copying the same tokens)
and, where megatron-core is installed, beside Megatron's own code; all take turns in one process.
"""

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nvfp4_train.data.indexed import HEADER, MAGIC, VERSION, IndexedTokens
from nvfp4_train.data.indexed_writer import IndexedWriter

VOCAB_SIZE = 32_000
LONGEST = 1626  # a document has 813 tokens on average, as web text
MANY_DOCUMENTS = 5_000_000
READ_TOKENS = 1 << 20
_UINT16 = np.dtype("<u2")


def best_seconds(variants: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, dict[str, float]]:
    """Run all variants in turns; return the least wall and CPU seconds of each."""
    best = {name: {"wall": float("inf"), "cpu": float("inf")} for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            best[name] = {clock: min(best[name][clock], found[clock]) for clock in found}
    return best


def peer_module() -> Any:
    """Return Megatron's module of token files, or None where it is not installed."""
    if importlib.util.find_spec("megatron") is None:
        return None
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def make_documents(num_tokens: int) -> list[np.ndarray]:
    """Return documents of 1 to LONGEST tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST, size=2 * num_tokens // LONGEST)
    tokens = rng.integers(0, VOCAB_SIZE, size=int(lengths.sum()), dtype=np.uint16)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def building(folder: Path, documents: list[np.ndarray], peer: Any) -> dict[str, Callable[[], object]]:
    """Write documents one by one."""
    wide = [document.astype(np.int64) for document in documents]
    joined, lengths = np.concatenate(documents), np.asarray([len(document) for document in documents])

    def one_by_one(given: list[np.ndarray]) -> None:
        with IndexedWriter(folder / "ours", dtype=_UINT16) as writer:
            for document in given:
                writer.add_document(document)

    def together() -> None:
        with IndexedWriter(folder / "together", dtype=_UINT16) as writer:
            writer.add_documents(joined, lengths)

    def bytes_only() -> None:
        with (folder / "bytes").open("wb") as file:
            file.write(joined.data)
            file.flush()
            os.fsync(file.fileno())

    variants: dict[str, Callable[[], object]] = {
        "bytes only": bytes_only,
        "build": lambda: one_by_one(documents),
        "build from int64": lambda: one_by_one(wide),
        "build in bulk": together,
    }
    if peer is not None:
        import torch

        tensors = [torch.from_numpy(document.astype(np.int32)) for document in documents]

        def theirs() -> None:
            builder = peer.IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=np.uint16)
            for tensor in tensors:
                builder.add_document(tensor, [len(tensor)])
            builder.finalize(str(folder / "theirs.idx"))

        variants["build, Megatron"] = theirs
    return variants


def reading(folder: Path, peer: Any) -> dict[str, Callable[[], object]]:
    """Read everything in file order; each token is copied, so that nothing is only pointed at."""
    pair = IndexedTokens(folder / "ours")
    room = np.empty(max(READ_TOKENS, LONGEST), dtype=np.uint16)

    def ranges() -> None:
        for first in range(0, pair.num_tokens, READ_TOKENS):
            tokens = pair.read(first, READ_TOKENS)
            room[: len(tokens)] = tokens

    def documents() -> None:
        for document in pair.documents():
            room[: len(document)] = document

    variants: dict[str, Callable[[], object]] = {
        "copy only": lambda: np.array(pair.tokens),
        "read ranges": ranges,
        "read documents": documents,
    }
    if peer is not None:
        theirs = peer.IndexedDataset(str(folder / "ours"))

        def their_documents() -> None:
            for index in range(len(theirs)):
                document = theirs[index]
                room[: len(document)] = document

        variants["read documents, Megatron"] = their_documents
    return variants


def write_many_documents(prefix: Path, number: int) -> None:
    """Write the index of so many documents, and a .bin of the right size without content."""
    lengths = np.random.default_rng(0).integers(1, LONGEST, size=number).astype("<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * _UINT16.itemsize
    with prefix.with_name(prefix.name + ".idx").open("wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, 8, number, number + 1))
        for array in (lengths, ends - lengths * _UINT16.itemsize, np.arange(number + 1, dtype="<i8")):
            index.write(array.data)
    with prefix.with_name(prefix.name + ".bin").open("wb") as data:
        data.truncate(int(ends[-1]))


def opening(prefix: Path, number: int) -> dict[str, Callable[[], object]]:
    """Open, checking everything, and find a document in the middle; and read the index, which cannot be avoided."""
    index = prefix.with_name(prefix.name + ".idx")
    return {
        "index bytes only": index.read_bytes,
        "open": lambda: IndexedTokens(prefix).document_starts_between(number // 2, number // 2 + 2),
        "open, with all starts in memory": lambda: IndexedTokens(prefix).document_starts(),
    }


def writer_memory(folder: Path, number: int) -> float:
    """Return the growth in MiB of what the writer holds while it writes so many documents (Python's allocations)."""
    import tracemalloc

    document = np.arange(4, dtype=np.uint16)
    with IndexedWriter(folder / "memory", dtype=_UINT16) as writer:
        for _ in range(100_000):
            writer.add_document(document)
        tracemalloc.start()
        for _ in range(number):
            writer.add_document(document)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak / 2**20


def main() -> None:
    """Measure, print a table, and write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description="Speed of token files.")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one round: whether it runs, not how fast")
    arguments = parser.parse_args()
    num_documents = MANY_DOCUMENTS
    if arguments.quick:
        arguments.tokens, arguments.rounds, num_documents = 400_000, 1, 50_000
    peer = peer_module()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = make_documents(arguments.tokens)
        num_tokens = sum(len(document) for document in documents)
        written = best_seconds(building(folder, documents, peer), rounds=arguments.rounds)
        read = best_seconds(reading(folder, peer), rounds=arguments.rounds)
        print(f"{num_tokens / 1e6:.1f} M tokens in {len(documents):,} documents{'':<16}{'wall':>14}{'CPU time':>14}")
        for row, seconds in (written | read).items():
            results[row] = {clock: num_tokens / 1e6 / spent for clock, spent in seconds.items()}
            print(f"{row:<50}{results[row]['wall']:>10.0f} M/s{results[row]['cpu']:>10.0f} M/s")
        write_many_documents(folder / "many", num_documents)
        for row, seconds in best_seconds(opening(folder / "many", num_documents), rounds=arguments.rounds).items():
            results[row] = seconds
            wall, cpu = seconds["wall"] * 1e3, seconds["cpu"] * 1e3
            print(f"{f'{row}, {num_documents:,} documents':<50}{wall:>10.1f} ms{cpu:>10.1f} ms")
        num_written = 2 * num_documents // 5
        growth = writer_memory(folder, num_written)
        results["writer memory"] = {"mib": growth}
        print(f"{f'memory of the writer over {num_written:,} documents':<50}{growth:>10.2f} MiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
