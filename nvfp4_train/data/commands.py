"""The command line of ``prepare_data.py``: what each subcommand accepts, and what it calls."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from nvfp4_train.data.divide import divide_by_count, divide_by_share, divide_by_size
from nvfp4_train.data.encoders.base import Encoder
from nvfp4_train.data.encoders.load import EncoderSpec, load_encoder
from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import read_manifest, shard_prefixes
from nvfp4_train.data.merge import merge_pairs
from nvfp4_train.data.progress import announce
from nvfp4_train.data.sources.hub import HubDataset
from nvfp4_train.data.sources.open import SourceSpec
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.summary import document_lines, manifest_lines, summarize
from nvfp4_train.data.tokenizing.job import OnError, TokenizeJob, TokenizeResources, tokenize
from nvfp4_train.data.train_bpe import TrainJob, train_bpe
from nvfp4_train.data.verify import verify_tokens

_GIB = 1 << 30


def run_command(arguments: list[str]) -> None:
    """Run one subcommand.

    Raises:
        DataError: Something cannot be used.
        SystemExit: The arguments are wrong, or help was asked for.
    """
    options = build_parser().parse_args(arguments)
    options.run(options)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="prepare_data.py", description="Make, join, divide and check token files.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_tokenizer(commands.add_parser("tokenizer", help="train a byte-level BPE on text"))
    _add_tokenize(commands.add_parser("tokenize", help="turn text into .bin/.idx files"))
    _add_merge(commands.add_parser("merge", help="put pairs together"))
    _add_split(commands.add_parser("split", help="divide a pair"))
    _add_inspect(commands.add_parser("inspect", help="show what a pair holds"))
    _add_verify(commands.add_parser("verify", help="check a pair or a set of shards completely"))
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("source")
    which = source.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--input", nargs="+", default=[], metavar="PATH",
        help="files, folders, globs or URIs: .jsonl (also .gz, .zst), .parquet, .txt, .md",
    )  # fmt: skip
    which.add_argument("--dataset", default="", metavar="NAME", help="Hugging Face dataset: name or local folder")
    source.add_argument("--subset", default="", help="configuration of the dataset")
    source.add_argument("--split", default="train", help="split of the dataset (train)")
    source.add_argument("--revision", default="", help="branch, tag or commit of the dataset")
    source.add_argument(
        "--streaming", action=argparse.BooleanOptionalAction, default=True,
        help="read the dataset while downloading it, not after",
    )  # fmt: skip
    source.add_argument("--column", default="text", help="key or column that holds the text (text)")
    source.add_argument(
        "--on-error", type=OnError, choices=list(OnError), default=OnError.stop,
        help="at a record that cannot be read: count and report it, or stop (stop)",
    )  # fmt: skip
    _add_staging(source)


def _add_staging(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--staging-dir", type=Path, default=Path("~/.cache/nvfp4_train/staging"), help="local copies of remote files"
    )
    group.add_argument("--staging-gib", type=float, default=100.0, help="what these copies may take (100)")


def _add_encoder(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--tokenizer", required=required, default="", metavar="PATH",
        help="tokenizer.json or a folder with one, .model (sentencepiece), .tiktoken, or `bytes`",
    )  # fmt: skip
    parser.add_argument("--eod-token", default="", help="token that ends a document, where the tokenizer does not say")
    parser.add_argument("--tiktoken-pattern", default="", help="pattern of a .tiktoken file of one's own")


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--output", type=Path, required=True, help="tokenizer.json to write")
    parser.add_argument("--vocab-size", type=_positive(int), required=True, help="entries, 260 or more")
    parser.add_argument(
        "--sample-characters", type=_positive(int), default=100_000_000, help="text to train on, drawn by hash"
    )
    parser.set_defaults(run=_run_tokenizer)


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    _add_encoder(parser, required=True)
    parser.add_argument("--output", type=Path, required=True, help="prefix of what is written")
    parser.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--workers", type=_positive(int), default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--shard-tokens", type=_positive(int), default=0, help="write shards of this size")
    parser.add_argument("--max-tokens", type=_positive(int), default=0, help="stop with the document that reaches it")
    parser.add_argument(
        "--validation-fraction", type=_fraction, default=0.0, help="share of documents for OUTPUT_validation"
    )
    parser.add_argument("--checkpoint-seconds", type=_positive(float), default=30.0, help="between two saved states")
    parser.set_defaults(run=_run_tokenize)


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", nargs="+", type=Path, required=True, metavar="PREFIX", help="pairs or sets of shards"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX")
    parser.set_defaults(run=_run_merge)


def _add_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--shard-tokens", type=_positive(int), help="tokens a shard, in file order")
    how.add_argument("--num-shards", type=_positive(int), help="number of shards, in file order")
    how.add_argument("--shares", type=_shares, metavar="NAME=SHARE,...", help="for example train=0.99,validation=0.01")
    parser.set_defaults(run=_run_split)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", type=Path, metavar="PREFIX")
    parser.add_argument("--document", type=int, nargs="+", default=[], metavar="N", help="documents to show")
    _add_encoder(parser, required=False)
    parser.set_defaults(run=_run_inspect)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", type=Path, nargs="+", metavar="PREFIX")
    parser.add_argument("--vocab-size", type=_positive(int), default=None, help="ids must lie below it")
    parser.set_defaults(run=_run_verify)


def _run_tokenizer(options: argparse.Namespace) -> None:
    job = TrainJob(
        source=_source(options),
        output=options.output,
        vocab_size=options.vocab_size,
        sample_characters=options.sample_characters,
        on_error=options.on_error,
    )
    with _staging(options) as staging:
        train_bpe(job, staging=staging)


def _run_tokenize(options: argparse.Namespace) -> None:
    job = TokenizeJob(
        source=_source(options),
        output=options.output,
        encoder=_encoder_spec(options),
        append_end=options.append_eod,
        shard_tokens=options.shard_tokens,
        max_tokens=options.max_tokens,
        validation_fraction=options.validation_fraction,
        on_error=options.on_error,
    )
    with _staging(options) as staging:
        resources = TokenizeResources(
            num_workers=options.workers, checkpoint_seconds=options.checkpoint_seconds, staging=staging
        )
        for name, manifest in tokenize(job, resources).items():
            announce(
                f"{options.output.with_name(name)}: {manifest.num_tokens:,} tokens of {manifest.dtype} in "
                f"{manifest.num_documents:,} documents and {len(manifest.shards)} pairs; "
                f"{manifest.num_empty:,} records were empty, {manifest.num_errors:,} bad"
            )


def _run_merge(options: argparse.Namespace) -> None:
    manifest = merge_pairs(options.input, options.output)
    announce(f"{options.output}: {manifest.num_tokens:,} tokens in {manifest.num_documents:,} documents")


def _run_split(options: argparse.Namespace) -> None:
    if options.shard_tokens:
        written = divide_by_size(options.input, options.output, shard_tokens=options.shard_tokens)
    elif options.num_shards:
        written = divide_by_count(options.input, options.output, num_shards=options.num_shards)
    else:
        written = divide_by_share(options.input, options.output, shares=options.shares)
    for path in written:
        announce(str(path))


def _run_inspect(options: argparse.Namespace) -> None:
    manifest = read_manifest(options.prefix)
    encoder = _inspecting_encoder(options)
    lines = [line for shard in shard_prefixes(options.prefix) for line in summarize(shard).lines()]
    lines += manifest_lines(manifest) if manifest is not None else []
    for index in options.document:
        lines += document_lines(options.prefix, index, encoder)
    for line in lines:
        print(line)  # noqa: T201 - this is the command's output


def _run_verify(options: argparse.Namespace) -> None:
    for prefix in options.prefix:
        verified = verify_tokens(prefix, vocab_size=options.vocab_size)
        announce(
            f"{prefix}: {verified.num_tokens:,} tokens in {verified.num_documents:,} documents are right: "
            + ", ".join(verified.checks)
        )


def _inspecting_encoder(options: argparse.Namespace) -> Encoder | None:
    """Return the tokenizer that was named, or that which the manifest names if it is still there and the same."""
    if options.tokenizer:
        return load_encoder(_encoder_spec(options))
    manifest = read_manifest(options.prefix)
    if not options.document or manifest is None or manifest.tokenizer is None:
        return None
    encoder = load_encoder(EncoderSpec(name=manifest.tokenizer.name))
    if encoder.digest != manifest.tokenizer.digest:
        raise DataError(
            encoder.name, found=f"a tokenizer with hash {encoder.digest}",
            expected=f"{manifest.tokenizer.digest}, which made the tokens", fix="name that one with --tokenizer",
        )  # fmt: skip
    return encoder


def _source(options: argparse.Namespace) -> SourceSpec:
    dataset = HubDataset(
        name=options.dataset,
        subset=options.subset,
        split=options.split,
        revision=options.revision,
        streaming=options.streaming,
    )
    return SourceSpec(inputs=options.input, dataset=dataset if options.dataset else None, column=options.column)


def _encoder_spec(options: argparse.Namespace) -> EncoderSpec:
    return EncoderSpec(name=options.tokenizer, end_token=options.eod_token, tiktoken_pattern=options.tiktoken_pattern)


def _staging(options: argparse.Namespace) -> Staging:
    return Staging(options.staging_dir.expanduser(), max_bytes=int(options.staging_gib * _GIB))


def _positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        value = kind(text.replace("_", ""))
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _shares(text: str) -> dict[str, float]:
    try:
        return {name: float(share) for name, share in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} does not read NAME=SHARE,NAME=SHARE") from error
