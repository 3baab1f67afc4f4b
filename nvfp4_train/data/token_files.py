"""Find the ``.bin/.idx`` pairs that a source names."""

import glob
import json
import os
from pathlib import Path

from nvfp4_train.data.error import DataError
from nvfp4_train.data.manifest import read_manifest, shard_prefixes
from nvfp4_train.data.staging import Staging, is_uri, open_file_system

_ENDING = ".idx"
_MANIFEST = ".manifest.json"


def find_pairs(paths: list[str], *, staging: Staging, vocab_size: int) -> list[Path]:
    """Return the local prefixes of all pairs that paths name, each once.

    A path is a pair or a set of shards (without ending), a folder, or a glob; local or an fsspec URI. Pairs come in the
    order of ``paths``, and sorted by name within a folder or glob. Remote files are staged.

    Args:
        paths: What the user named; ``~`` and environment variables are expanded in local ones.
        staging: Where copies of remote files go.
        vocab_size: Entries of the model's vocabulary.

    Raises:
        DataError: A path names nothing, or was made with a tokenizer that has more entries than the model.
    """
    found: dict[Path, None] = {}
    for path in paths:
        prefixes = _remote_pairs(path, staging) if is_uri(path) else _local_pairs(path, vocab_size=vocab_size)
        if not prefixes:
            raise DataError(
                path, found="no .bin/.idx pair", expected="a pair (without its ending), a folder or a glob of pairs",
                fix="check the paths of data.sources and data.validation",
            )  # fmt: skip
        found |= dict.fromkeys(prefixes)
    return list(found)


def _local_pairs(given: str, *, vocab_size: int) -> list[Path]:
    text = os.path.expandvars(given.removeprefix("file://"))
    path = Path(text).expanduser()
    if path.is_dir():
        return [_without_ending(file) for file in sorted(path.rglob(f"*{_ENDING}"))]
    path = _without_ending(path)
    if _exists(path, _ENDING) or _exists(path, _MANIFEST):
        _check_tokenizer(path, vocab_size=vocab_size)
        return shard_prefixes(path)
    if not glob.has_magic(str(path)):
        return []
    names = glob.glob(f"{path}{_ENDING}", recursive=True)
    if not names:  # a glob of folders
        names = glob.glob(f"{path}/**/*{_ENDING}", recursive=True)
    return [_without_ending(Path(name)) for name in sorted(names)]


def _remote_pairs(uri: str, staging: Staging) -> list[Path]:
    system, path = open_file_system(uri)
    protocol = uri.partition("://")[0]
    path = path.removesuffix(_ENDING).removesuffix(".bin")
    if system.exists(path + _ENDING):
        names = [path]
    elif system.exists(path + _MANIFEST):
        shards = json.loads(system.cat_file(path + _MANIFEST))["shards"]
        names = [f"{path.rpartition('/')[0]}/{shard['name']}" for shard in shards]
    else:
        pattern = path + _ENDING if glob.has_magic(path) else f"{path}/*{_ENDING}"
        names = [name.removesuffix(_ENDING) for name in sorted(system.glob(pattern))]
    return [staging.pair(f"{protocol}://{name}") for name in names]


def _check_tokenizer(prefix: Path, *, vocab_size: int) -> None:
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.tokenizer is not None and manifest.tokenizer.vocab_size > vocab_size:
        raise DataError(
            prefix,
            found=f"tokens of {manifest.tokenizer.name}, which has {manifest.tokenizer.vocab_size} entries",
            expected=f"at most model.vocab_size ({vocab_size})",
            fix="raise model.vocab_size, or tokenize the text again with a smaller tokenizer",
        )


def _exists(prefix: Path, ending: str) -> bool:
    return prefix.with_name(prefix.name + ending).is_file()


def _without_ending(path: Path) -> Path:
    name = path.name.removesuffix(_ENDING).removesuffix(".bin").removesuffix(_MANIFEST)
    return path.with_name(name)
