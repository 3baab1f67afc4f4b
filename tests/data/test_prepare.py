import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvfp4_train.config.data import PythonStdlibDataConfig
from nvfp4_train.data import corpus, prepare
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.prepare import prepare_data
from nvfp4_train.data.split import Split
from nvfp4_train.data.tokenizer import load_tokenizer
from tests.support.token_files import text_config

ROOT = Path(__file__).parents[2]
NUM_DOCUMENTS = 40

# Prepares like the package, but says so in mid-preparation and waits there for a line on stdin.
PAUSING = """
import sys
from pathlib import Path
from nvfp4_train.data import prepare
from tests.support.token_files import text_config

encode = prepare.encode_documents

def pausing(documents, **options):
    for number, item in enumerate(encode(documents, **options)):
        yield item
        if number == 5:
            print("paused", flush=True)
            sys.stdin.readline()

prepare.encode_documents = pausing
print(prepare.prepare_data(text_config(Path(sys.argv[1]), sys.argv[2])).folder, flush=True)
"""


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(NUM_DOCUMENTS):
        (folder / f"{number:02}.txt").write_text(
            f"Document {number}: " + "some words, again and again. " * (number + 1)
        )
    return folder


@pytest.fixture
def start(tmp_path, texts):
    """Start a process that prepares the texts with a pause; none outlives the test."""
    processes = []

    def start_one():
        process = subprocess.Popen(
            [sys.executable, "-c", PAUSING, str(tmp_path), str(texts)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def read_until(process, words):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return
        if "paused" in line:
            break
    pytest.fail(f"no {words!r} in {lines}")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(prepared, split):
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    (prefix,) = prepared.prefixes(split)
    pair = IndexedTokens(prefix)
    return [tokenizer.decode(pair.document(i)[:-1].tolist()) for i in range(pair.num_documents)]


def test_every_document_is_in_one_split_and_in_order(tmp_path, texts):
    prepared = prepare_data(text_config(tmp_path, texts))
    train, validation = decoded(prepared, Split.train), decoded(prepared, Split.validation)
    everything = [path.read_text() for path in sorted(texts.iterdir())]
    assert validation
    assert len(train) + len(validation) == NUM_DOCUMENTS
    assert [text for text in everything if text in set(train)] == train
    assert [text for text in everything if text in set(validation)] == validation


def test_manifest_says_what_the_folder_holds(tmp_path, texts):
    prepared = prepare_data(text_config(tmp_path, texts))
    manifest = prepared.manifest
    assert manifest.num_files == NUM_DOCUMENTS
    assert manifest.vocab_size <= 300
    assert manifest.dtype == "uint16"
    for split in Split:
        (prefix,) = prepared.prefixes(split)
        pair = IndexedTokens(prefix)
        assert (pair.num_tokens, pair.num_documents) == (manifest.num_tokens[split], manifest.num_documents[split])
    listed = {"tokenizer.json", *(f"{split}.{ending}" for split in Split for ending in ("bin", "idx"))}
    assert set(manifest.file_digests) == listed
    assert {path.name for path in prepared.folder.iterdir()} == listed | {"manifest.json"}


def test_second_run_finds_it_prepared(tmp_path, texts, monkeypatch, capsys):
    first = prepare_data(text_config(tmp_path, texts))
    assert "prepared" in capsys.readouterr().out
    monkeypatch.setattr(prepare, "train_tokenizer", None)
    assert prepare_data(text_config(tmp_path, texts)) == first
    assert capsys.readouterr().out == ""


def test_changed_text_or_options_are_prepared_again(tmp_path, texts):
    def fingerprint(**changes):
        return prepare_data(text_config(tmp_path, texts, **changes)).manifest.fingerprint

    fingerprints = [fingerprint(), fingerprint(tokenizer_vocab_size=290), fingerprint(validation_fraction=0.5)]
    (texts / "00.txt").write_text("changed")
    fingerprints.append(fingerprint())
    assert len(set(fingerprints)) == 4


def test_options_that_shape_no_token_do_not_count(tmp_path, texts):
    first = prepare_data(text_config(tmp_path, texts))
    assert prepare_data(text_config(tmp_path, texts, prefetch=9)).folder == first.folder


def test_preparing_twice_gives_equal_files(tmp_path, texts):
    folders = [prepare_data(text_config(tmp_path / name, texts)).folder for name in ("one", "two")]
    assert contents(folders[0]) == contents(folders[1])


def test_kill_in_mid_preparation_leaves_nothing_that_counts(tmp_path, texts, start):
    process = start()
    read_until(process, "paused")
    process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [".partial"]
    again = prepare_data(text_config(tmp_path, texts))
    unbroken = prepare_data(text_config(tmp_path / "other", texts))
    assert contents(again.folder) == contents(unbroken.folder)
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_second_process_waits_for_the_first_and_uses_its_files(start):
    first = start()
    read_until(first, "paused")
    second = start()
    read_until(second, "waiting for it")
    first_output, _ = first.communicate("go on\n", timeout=60)
    second_output, _ = second.communicate("", timeout=60)
    assert first.returncode == second.returncode == 0
    assert "paused" not in second_output
    assert first_output.splitlines()[-1] == second_output.splitlines()[-1]
    assert os.listdir(first_output.splitlines()[-1])


def test_bad_line_stops_before_anything_is_kept(tmp_path, texts):
    (texts / "zz.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(DataError, match=r"zz\.jsonl:2"):
        prepare_data(text_config(tmp_path, texts))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    with pytest.raises(DataError, match="no text in 1 files"):
        prepare_data(text_config(tmp_path, tmp_path / "texts"))


def test_text_that_changes_while_it_is_read_is_refused(tmp_path, texts, monkeypatch):
    train = prepare.train_tokenizer

    def training_while_someone_writes(documents, **options):
        (texts / "05.txt").write_text("written just now")
        return train(documents, **options)

    monkeypatch.setattr(prepare, "train_tokenizer", training_while_someone_writes)
    with pytest.raises(DataError, match="changed while they were read"):
        prepare_data(text_config(tmp_path, texts))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_one_file_gives_both_splits(tmp_path):
    (tmp_path / "input.txt").write_text("".join(f"This is line {number}.\n" for number in range(500)))
    prepared = prepare_data(text_config(tmp_path, tmp_path / "input.txt"))
    assert prepared.manifest.split_method == "by_tail"
    (train,), (validation,) = decoded(prepared, Split.train), decoded(prepared, Split.validation)
    assert train + validation == (tmp_path / "input.txt").read_text()


def test_damaged_manifest_is_named(tmp_path, texts):
    prepared = prepare_data(text_config(tmp_path, texts))
    path = prepared.folder / "manifest.json"
    path.write_text(json.dumps({"fingerprint": "x"}))
    with pytest.raises(DataError, match="no readable manifest") as caught:
        prepare_data(text_config(tmp_path, texts))
    assert caught.value.path == str(path)


def test_standard_library_is_prepared(tmp_path, monkeypatch):
    # Two packages of the real library and the topics; the whole takes too long for a test.
    library = Path(corpus.sysconfig.get_paths()["stdlib"])
    small = tmp_path / "lib"
    small.mkdir()
    for name in ("json", "pydoc_data"):
        (small / name).mkdir()
        for path in (library / name).glob("*.py"):
            (small / name / path.name).symlink_to(path)
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(small)})
    cfg = PythonStdlibDataConfig(
        cache_dir=str(tmp_path / "cache"), validation_fraction=0.1, tokenizer_vocab_size=400, prefetch=0
    )
    prepared = prepare_data(cfg)
    train, validation = decoded(prepared, Split.train), decoded(prepared, Split.validation)
    assert any("JSONDecodeError" in text for text in train + validation)
    assert any(text.startswith('The "yield" statement') for text in train + validation)
    assert prepared.manifest.vocab_size == 400
