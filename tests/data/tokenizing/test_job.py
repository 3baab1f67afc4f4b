import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nvfp4_train.data.encoders.load import EncoderSpec
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.sources import lines
from nvfp4_train.data.sources.open import SourceSpec
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.tokenizing import job as module
from nvfp4_train.data.tokenizing.job import OnError, TokenizeJob, TokenizeResources, tokenize
from tests.support.text_sources import ROOT, SCRIPT, child_environment, write_jsonl, write_parquet
from tests.support.tokenizer_files import write_huggingface

TEXTS = [f"document {number}: " + "some words, again and again " * (number % 40) for number in range(600)]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_BATCH_BYTES", 20_000)
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS[:300])
    write_jsonl(folder / "b.jsonl.gz", TEXTS[300:500])
    for number, text in enumerate(TEXTS[500:]):
        (folder / f"c{number:03}.txt").write_text(text)
    return folder


def make_job(tmp_path, texts, name="out", **changes):
    options = {
        "source": SourceSpec(inputs=[str(texts)]),
        "output": tmp_path / name / "tokens",
        "encoder": EncoderSpec(name="bytes"),
    }
    return TokenizeJob(**(options | changes))


def run(tmp_path, job, *, num_workers=1, checkpoint_seconds=1000.0):
    staging = Staging(tmp_path / "staging", max_bytes=0)
    resources = TokenizeResources(num_workers=num_workers, checkpoint_seconds=checkpoint_seconds, staging=staging)
    return tokenize(job, resources)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(prefix):
    return [bytes(document[:-1].astype("u1")).decode() for document in IndexedTokens(prefix).documents()]


def test_every_document_is_there_in_order_and_the_manifest_says_so(tmp_path, texts):
    manifest = run(tmp_path, make_job(tmp_path, texts))["tokens"]
    assert decoded(tmp_path / "out" / "tokens") == TEXTS
    pair = IndexedTokens(tmp_path / "out" / "tokens")
    assert (manifest.num_documents, manifest.num_tokens) == (600, pair.num_tokens)
    assert (manifest.num_empty, manifest.num_errors, manifest.dtype) == (0, 0, "uint16")
    assert len(manifest.sources) == 102
    assert all(pair.document(index)[-1] == 256 for index in range(600))
    assert set(contents(tmp_path / "out")) == {"tokens.bin", "tokens.idx", "tokens.manifest.json"}


@pytest.mark.parametrize(
    "changes", [{}, {"shard_tokens": 40_000}, {"shard_tokens": 40_000, "validation_fraction": 0.1}]
)
def test_output_does_not_depend_on_the_number_of_workers(tmp_path, texts, changes):
    for num_workers in (1, 3):
        run(tmp_path, make_job(tmp_path, texts, f"out{num_workers}", **changes), num_workers=num_workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out3")
    assert len(contents(tmp_path / "out1")) >= 3


def test_huggingface_tokenizer_and_large_vocabularies(tmp_path, texts):
    path = write_huggingface(tmp_path / "tokenizer.json")
    manifest = run(tmp_path, make_job(tmp_path, texts, encoder=EncoderSpec(name=str(path))))["tokens"]
    assert manifest.tokenizer.end_of_document == 0
    assert manifest.tokenizer.vocab_size == 300
    assert manifest.num_tokens < sum(map(len, TEXTS)) / 1.2


def test_validation_is_drawn_by_the_text(tmp_path, texts):
    run(tmp_path, make_job(tmp_path, texts, validation_fraction=0.2))
    sides = [decoded(tmp_path / "out" / f"tokens_{side}") for side in ("train", "validation")]
    assert len(sides[0]) + len(sides[1]) == 600
    assert 60 < len(sides[1]) < 180
    assert [text for text in TEXTS if text in set(sides[1])] == sides[1]


def test_max_tokens_ends_with_the_document_that_reaches_it(tmp_path, texts):
    manifest = run(tmp_path, make_job(tmp_path, texts, max_tokens=5000))["tokens"]
    found = decoded(tmp_path / "out" / "tokens")
    assert found == TEXTS[: len(found)]
    assert 5000 <= manifest.num_tokens < 5000 + len(found[-1]) + 1
    assert len(manifest.sources) == 1


def test_second_run_finds_it_done_and_another_job_is_refused(tmp_path, texts, monkeypatch):
    first = run(tmp_path, make_job(tmp_path, texts))
    monkeypatch.setattr(module, "WorkerPool", None)
    assert run(tmp_path, make_job(tmp_path, texts)) == first
    with pytest.raises(DataError, match="tokens of another job"):
        run(tmp_path, make_job(tmp_path, texts, append_end=False))
    (texts / "c000.txt").write_text("changed")
    with pytest.raises(DataError, match="tokens of another job"):
        run(tmp_path, make_job(tmp_path, texts))


def test_files_of_others_are_not_overwritten(tmp_path, texts):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokens.idx").write_text("mine")
    with pytest.raises(DataError, match="another job"):
        run(tmp_path, make_job(tmp_path, texts))
    assert (tmp_path / "out" / "tokens.idx").read_text() == "mine"


def bad_lines(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": broken}\n{"text": ""}\n{"body": "x"}\n{"text": "two"}\n')
    return path


def test_bad_lines_are_skipped_counted_and_named(tmp_path, capsys):
    path = bad_lines(tmp_path)
    manifest = run(tmp_path, make_job(tmp_path, path, on_error=OnError.skip))["tokens"]
    assert decoded(tmp_path / "out" / "tokens") == ["one", "two"]
    assert (manifest.num_errors, manifest.num_empty) == (2, 1)
    assert [error.split(": ")[0] for error in manifest.errors] == [f"{path}:3", f"{path}:5"]
    assert f"skipped {path}:3: invalid JSON" in capsys.readouterr().out


def test_bad_line_stops(tmp_path):
    path = bad_lines(tmp_path)
    with pytest.raises(DataError, match="--on-error skip") as caught:
        run(tmp_path, make_job(tmp_path, path))
    assert caught.value.path == f"{path}:3"
    assert list((tmp_path / "out").iterdir()) == []


def test_after_a_stop_the_rest_can_be_skipped(tmp_path, texts):
    path = texts / "a.jsonl"
    path.write_text(path.read_text() + "broken\n")
    with pytest.raises(DataError, match="invalid JSON") as caught:
        run(tmp_path, make_job(tmp_path, texts))
    assert caught.value.path == f"{path}:301"
    assert (tmp_path / "out" / "tokens.partial" / "progress.json").is_file()
    manifest = run(tmp_path, make_job(tmp_path, texts, on_error=OnError.skip))["tokens"]
    assert manifest.num_errors == 1
    assert decoded(tmp_path / "out" / "tokens") == TEXTS


@pytest.mark.parametrize("content", ["\n\n", '{"text": ""}\n'])
def test_source_without_documents(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match="no document in 1 files"):
        run(tmp_path, make_job(tmp_path, tmp_path / "a.jsonl"))
    assert list((tmp_path / "out").iterdir()) == []


def test_missing_column(tmp_path, texts):
    job = make_job(tmp_path, texts / "a.jsonl", source=SourceSpec(inputs=[str(texts / "a.jsonl")], column="body"))
    with pytest.raises(DataError, match="no column 'body'") as caught:
        run(tmp_path, job)
    assert caught.value.path == f"{texts / 'a.jsonl'}:1"
    with pytest.raises(DataError, match="300 bad records"):
        run(tmp_path, replace(job, on_error=OnError.skip))


def test_tokenizer_without_an_end(tmp_path, texts):
    encoder = EncoderSpec(name=str(write_huggingface(tmp_path / "tokenizer.json", end="<|mine|>")))
    with pytest.raises(DataError, match="--eod-token"):
        run(tmp_path, make_job(tmp_path, texts, encoder=encoder))
    manifest = run(tmp_path, make_job(tmp_path, texts, encoder=encoder, append_end=False))["tokens"]
    assert manifest.tokenizer.end_of_document is None


def test_source_that_changes_meanwhile_is_refused(tmp_path, texts, monkeypatch):
    take = module._Run._take

    def taking_while_someone_writes(self, batch, meter):
        os.utime(texts / "c099.txt", ns=(1, 1))
        take(self, batch, meter)

    monkeypatch.setattr(module._Run, "_take", taking_while_someone_writes)
    with pytest.raises(DataError, match="changed while it was read"):
        run(tmp_path, make_job(tmp_path, texts))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("half_written", [False, True])
def test_interruption_in_process_continues(tmp_path, texts, monkeypatch, error, half_written):
    options = {"shard_tokens": 30_000, "validation_fraction": 0.1}
    run(tmp_path, make_job(tmp_path, texts, "whole", **options))
    name = "_write" if half_written else "_take"
    original, calls = getattr(module._Run, name), []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 9:
            if half_written:
                original(self, *arguments)
            raise error
        original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module._Run, name, failing)
        with pytest.raises(type(error)):
            run(tmp_path, make_job(tmp_path, texts, **options), checkpoint_seconds=1e-9)
    run(tmp_path, make_job(tmp_path, texts, **options))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_unfinished_job_with_other_options_is_refused(tmp_path, texts, monkeypatch):
    def failing(self, *arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.ShardedOutput, "finish", failing)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, make_job(tmp_path, texts), checkpoint_seconds=1e-9)
    with pytest.raises(DataError, match="an unfinished job with another shard_tokens"):
        run(tmp_path, make_job(tmp_path, texts, shard_tokens=5))


class TestKill:
    """``kill -9`` of the whole program at any moment, then the same command again."""

    @pytest.fixture
    def corpus(self, tmp_path):
        folder = tmp_path / "texts"
        folder.mkdir()
        generator = random.Random(0)
        words = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 9))) for _ in range(400)]

        def text():
            return " ".join(generator.choices(words, k=generator.randint(1, 600)))

        write_jsonl(folder / "a.jsonl", [text() for _ in range(2500)])
        write_jsonl(folder / "b.jsonl.gz", [text() for _ in range(1500)])
        write_parquet(folder / "c.parquet", [text() for _ in range(1500)], group_rows=400)
        return folder

    def command(self, corpus, output):
        return [
            sys.executable, str(SCRIPT), "tokenize", "--input", str(corpus), "--tokenizer", "bytes", "--output",
            str(output), "--workers", "2", "--shard-tokens", "700000", "--checkpoint-seconds", "0.02",
            "--validation-fraction", "0.05",
        ]  # fmt: skip

    def start(self, corpus, output):
        return subprocess.Popen(
            self.command(corpus, output), cwd=ROOT, env=child_environment(), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def finish(self, corpus, output):
        process = self.start(corpus, output)
        assert process.wait(timeout=120) == 0

    def test_output_is_that_of_an_unbroken_run(self, tmp_path, corpus):
        self.finish(corpus, tmp_path / "whole" / "tokens")
        progress = tmp_path / "broken" / "tokens.partial" / "progress.json"
        kills = 0
        generator = random.Random(1)
        deadline = time.monotonic() + 100
        while kills < 4 and not (tmp_path / "broken" / "tokens_train.manifest.json").exists():
            process = self.start(corpus, tmp_path / "broken" / "tokens")
            before = progress.read_text() if progress.exists() else ""
            # Kill only after progress, so that every start is cut off somewhere new.
            while process.poll() is None and time.monotonic() < deadline:
                if progress.exists() and progress.read_text() != before:
                    time.sleep(generator.uniform(0, 0.15))
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    break
                time.sleep(0.005)
            assert process.wait(timeout=60) in (0, -signal.SIGKILL)
        assert kills >= 2
        self.finish(corpus, tmp_path / "broken" / "tokens")
        assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
        assert len(contents(tmp_path / "whole")) > 8

    def test_workers_do_not_outlive_it(self, tmp_path, corpus):
        process = self.start(corpus, tmp_path / "out" / "tokens")
        progress = tmp_path / "out" / "tokens.partial" / "progress.json"
        deadline = time.monotonic() + 60
        while not progress.exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.kill()
        process.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_manifest_is_the_same_after_an_interruption(tmp_path, texts, monkeypatch):
    whole = run(tmp_path, make_job(tmp_path, texts, "whole"))["tokens"]
    put_in_place, calls = module._put_in_place, []

    def killed_between_files(folder, shards):
        calls.append(1)
        if len(calls) == 1:
            source = folder / f"{shards[0].name}.bin"
            source.replace(folder.parent / source.name)
            raise KeyboardInterrupt
        put_in_place(folder, shards)

    monkeypatch.setattr(module, "_put_in_place", killed_between_files)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, make_job(tmp_path, texts))
    assert asdict(run(tmp_path, make_job(tmp_path, texts))["tokens"]) == asdict(whole)
