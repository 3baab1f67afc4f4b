import pytest

from nvfp4_train.data.commands import build_parser, run_command
from nvfp4_train.data.error import DataError
from nvfp4_train.data.indexed import IndexedTokens
from tests.support.text_sources import write_jsonl
from tests.support.token_files import GOLDEN_PAIRS

TEXTS = [f"document {number} " + "words " * number for number in range(60)]


@pytest.fixture
def tokens(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    run_command(tokenize(tmp_path, "tokens"))
    return tmp_path / "tokens"


def tokenize(tmp_path, name, *more):
    return [
        "tokenize", "--input", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--output", str(tmp_path / name),
        "--workers", "1", *more,
    ]  # fmt: skip


def test_tokenizer_then_tokenize_then_look(tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    tokenizer = str(tmp_path / "tokenizer.json")
    run_command(["tokenizer", "--input", str(tmp_path / "a.jsonl"), "--vocab-size", "280", "--output", tokenizer])
    output = str(tmp_path / "tokens")
    run_command(
        ["tokenize", "--input", str(tmp_path / "a.jsonl"), "--tokenizer", tokenizer, "--output", output, "--workers",
         "1", "--max-tokens", "1_000"]
    )  # fmt: skip
    assert 1000 <= IndexedTokens(tmp_path / "tokens").num_tokens < 1200
    capsys.readouterr()
    run_command(["inspect", output, "--document", "3"])
    shown = capsys.readouterr().out
    assert TEXTS[3] in shown
    assert "280 ids" in shown
    run_command(["verify", output])
    assert "token ids below 280" in capsys.readouterr().out


def test_split_and_merge_give_the_pair_again(tmp_path, tokens):
    for how in (["--shard-tokens", "500"], ["--num-shards", "4"]):
        part = tmp_path / f"part{len(how[0])}"
        run_command(["split", "--input", str(tokens), "--output", str(part), *how])
        run_command(["merge", "--input", str(part), "--output", str(part) + "_again"])
        assert (tmp_path / f"{part.name}_again.bin").read_bytes() == (tmp_path / "tokens.bin").read_bytes()
        assert (tmp_path / f"{part.name}_again.idx").read_bytes() == (tmp_path / "tokens.idx").read_bytes()
    run_command(["split", "--input", str(tokens), "--output", str(tmp_path / "x"), "--shares", "train=0.5,test=0.5"])
    sizes = [IndexedTokens(tmp_path / f"x_{name}").num_documents for name in ("train", "test")]
    assert sum(sizes) == 60
    assert min(sizes) > 10


def test_options_reach_the_job(tmp_path, tokens):
    run_command(tokenize(tmp_path, "plain", "--no-append-eod", "--validation-fraction", "0.5"))
    pairs = [IndexedTokens(tmp_path / f"plain_{side}") for side in ("train", "validation")]
    assert sum(pair.num_tokens for pair in pairs) == IndexedTokens(tokens).num_tokens - 60


def test_verify_refuses_ids_beyond_a_vocabulary(tokens):
    with pytest.raises(DataError, match="token id 256"):
        run_command(["verify", str(tokens), "--vocab-size", "256"])


def test_inspect_needs_no_manifest_or_tokenizer(capsys):
    run_command(["inspect", str(GOLDEN_PAIRS / "multi_seq_modes_int32"), "--document", "0"])
    assert "with modes" in capsys.readouterr().out


def test_inspect_refuses_a_tokenizer_that_changed(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    path = tmp_path / "tokenizer.json"
    for size, name in (("280", "one"), ("270", "two")):
        path.unlink(missing_ok=True)
        run_command(["tokenizer", "--input", str(tmp_path / "a.jsonl"), "--vocab-size", size, "--output", str(path)])
        if name == "one":
            run_command(
                ["tokenize", "--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(path), "--output",
                 str(tmp_path / "tokens"), "--workers", "1"]
            )  # fmt: skip
    with pytest.raises(DataError, match="which made the tokens"):
        run_command(["inspect", str(tmp_path / "tokens"), "--document", "0"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["tokenize", "--tokenizer", "bytes", "--output", "x"],
        ["tokenize", "--input", "a", "--dataset", "b", "--tokenizer", "bytes", "--output", "x"],
        ["tokenize", "--input", "a", "--tokenizer", "bytes", "--output", "x", "--workers", "0"],
        ["tokenize", "--input", "a", "--tokenizer", "bytes", "--output", "x", "--on-error", "ignore"],
        ["tokenize", "--input", "a", "--tokenizer", "bytes", "--output", "x", "--validation-fraction", "1"],
        ["tokenize", "--input", "a", "--tokenizer", "bytes", "--output", "x", "--checkpoint-seconds", "nan"],
        ["split", "--input", "a", "--output", "b", "--shares", "train"],
        ["split", "--input", "a", "--output", "b", "--shards", "3", "--num-shards", "3"],
    ],
)
def test_wrong_arguments_end_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(arguments)
    assert caught.value.code == 2
    assert "usage: prepare_data.py" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tokenizer", "tokenize", "merge", "split", "inspect", "verify"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([command, "--help"])
    assert caught.value.code == 0
    assert f"prepare_data.py {command}" in capsys.readouterr().out
