"""What a mistyped name was probably meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like ``word``, or None if none is like it."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def choice_fix(word: str, known: Iterable[str]) -> str:
    """Return a fix for a word that is not among the known ones: the most similar one, or all of them."""
    known = list(known)
    match = closest(word, known)
    choices = f"choices: {', '.join(known)}"
    return f"did you mean {match}? {choices}" if match else choices


def key_fix(key: str, known: list[str]) -> str:
    """Return a fix for an unknown dotted key: the keys it was probably meant to be, or those beside it.

    Looks for a similar key, then for the same name elsewhere, then for names that contain it as a word (``lr``), then
    for a similar name.

    Args:
        key: The unknown key.
        known: Every dotted key.
    """
    name = _name(key)
    found = (
        get_close_matches(key, known, n=1, cutoff=0.8)
        or [candidate for candidate in known if _name(candidate) == name]
        or [candidate for candidate in known if name in _name(candidate).split("_")]
        or get_close_matches(key, known, n=1, cutoff=0.7)
        or [candidate for candidate in known if _name(candidate) == closest(name, map(_name, known))]
    )
    if found:
        return f"did you mean {' or '.join(found[:3])}?"
    return _keys_beside(key, known)


def _keys_beside(key: str, known: list[str]) -> str:
    """Say which keys the group of ``key`` has; where there is no such group, which groups there are."""
    group = key.rpartition(".")[0]
    below = [candidate.removeprefix(f"{group}.") for candidate in known if candidate.startswith(f"{group}.")]
    names = dict.fromkeys(candidate.split(".")[0] for candidate in below or known)
    return f"keys of {group}: {', '.join(names)}" if below else f"groups and keys: {', '.join(names)}"


def _name(key: str) -> str:
    return key.rpartition(".")[2]
