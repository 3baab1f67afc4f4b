"""The grammar of the layer pattern: one letter, one residual block."""

from enum import StrEnum

from nvfp4_train.config.problem import ConfigError, Problem


class LayerKind(StrEnum):
    """The mixer of one residual block."""

    mamba = "M"
    attention = "*"
    mlp = "-"


LETTERS = {kind.value: kind for kind in LayerKind}
PATTERN_FIX = "use only " + ", ".join(f"{kind.value} ({kind.name})" for kind in LayerKind)


def parse_pattern(pattern: str) -> tuple[LayerKind, ...]:
    """Turn a layer pattern into one kind per block.

    Args:
        pattern: Letters of ``LayerKind``, for example ``M-M*-``.

    Raises:
        ConfigError: naming the key ``pattern`` and pointing at each wrong character.

    Source: the hybrid pattern of Megatron-LM, where one letter is one residual layer with one mixer.
    """
    if fault := pattern_fault(pattern):
        raise ConfigError([Problem(key="pattern", value=pattern, rule=fault, fix=PATTERN_FIX)])
    return tuple(LETTERS[letter] for letter in pattern)


def pattern_fault(pattern: str) -> str:
    """Return the rule that a pattern violates, with a pointer below each wrong character, or an empty string."""
    if not pattern:
        return "must name at least one block"
    wrong = [index for index, letter in enumerate(pattern) if letter not in LETTERS]
    if not wrong:
        return ""
    places = ", ".join(f"{pattern[index]!r} at position {index}" for index in wrong)
    pointer = "".join("^" if index in wrong else " " for index in range(wrong[-1] + 1))
    return f"each letter must be known; found {places} (counted from 0)\n          {pattern}\n          {pointer}"


def known_kinds(pattern: str) -> dict[int, LayerKind]:
    """Return the kind of each block whose letter is known, by its position; a faulty pattern is no error here."""
    return {index: LETTERS[letter] for index, letter in enumerate(pattern) if letter in LETTERS}
