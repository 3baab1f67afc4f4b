from nvfp4_train.data.indexed import IndexedTokens
from tests.support.text_sources import prepare, write_jsonl


def test_program_tokenizes_and_says_what_is_wrong(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    arguments = ["--tokenizer", "bytes", "--output", tmp_path / "out" / "tokens", "--workers", "2"]
    done = prepare("tokenize", "--input", path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "8 tokens of uint16 in 2 documents" in done.stdout
    assert IndexedTokens(tmp_path / "out" / "tokens").num_documents == 2

    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": \n')
    failed = prepare("tokenize", "--input", tmp_path / "b.jsonl", "--tokenizer", "bytes", "--output", tmp_path / "b")
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"error: {tmp_path / 'b.jsonl'}:2\n    found:    invalid JSON")
    assert "Traceback" not in failed.stderr


def test_program_explains_itself():
    done = prepare("--help")
    assert done.returncode == 0
    for command in ("tokenizer", "tokenize", "merge", "split", "inspect", "verify"):
        assert command in done.stdout
