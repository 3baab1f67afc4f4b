"""The grammar of the layer pattern: one letter, one residual block.

``M-M*|M-M*/*E/*E`` is eight blocks in two pipeline segments, and two multi-token-prediction depths of two blocks each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from nvfp4_train.config.problem import ConfigError, Problem


class LayerKind(StrEnum):
    """The mixer of one residual block."""

    mamba = "M"
    attention = "*"
    mlp = "-"
    moe = "E"


SEGMENT = "|"  # where the blocks of one pipeline segment end and those of the next begin
DEPTH = "/"  # before the blocks of each multi-token-prediction depth
LETTERS = {kind.value: kind for kind in LayerKind}
PATTERN_FIX = (
    "use "
    + ", ".join(f"{kind.value} ({kind.name})" for kind in LayerKind)
    + f"; {SEGMENT} between pipeline segments; {DEPTH} before each multi-token-prediction depth, all depths alike"
)


@dataclass(frozen=True, kw_only=True)
class LayerPattern:
    """A parsed pattern. Blocks are counted without separators, as Megatron-LM counts layers.

    Args:
        segments: The blocks of each pipeline segment, in order; a segment may be empty.
        mtp: The blocks of one multi-token-prediction depth; empty without such depths.
        num_mtp_depths: Number of depths, all with the blocks ``mtp``.
    """

    segments: tuple[tuple[LayerKind, ...], ...]
    mtp: tuple[LayerKind, ...]
    num_mtp_depths: int

    @classmethod
    @cache  # plans ask thousands of times; a pattern does not change
    def parse(cls, text: str) -> "LayerPattern":
        """Read a pattern.

        Raises:
            ConfigError: naming the key ``pattern`` and pointing at each wrong character.

        Source: the hybrid pattern of Megatron-LM, where one letter is one residual layer with one mixer.
        """
        if fault := pattern_fault(text):
            raise ConfigError([Problem(key="pattern", value=text, rule=fault, fix=PATTERN_FIX)])
        main, *depths = text.split(DEPTH)
        return cls(
            segments=tuple(_kinds(segment) for segment in main.split(SEGMENT)),
            mtp=_kinds(depths[0]) if depths else (),
            num_mtp_depths=len(depths),
        )

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The blocks of the main model, in order."""
        return tuple(kind for segment in self.segments for kind in segment)

    def __str__(self) -> str:
        main = SEGMENT.join("".join(segment) for segment in self.segments)
        return main + f"{DEPTH}{''.join(self.mtp)}" * self.num_mtp_depths


def parse_pattern(text: str) -> tuple[LayerKind, ...]:
    """Return the kind of each block of the main model.

    Raises:
        ConfigError: as ``LayerPattern.parse`` does.
    """
    return LayerPattern.parse(text).layers


def pattern_fault(text: str) -> str:
    """Return the rule that a pattern violates, with a pointer below each wrong character, or an empty string."""
    main = text.split(DEPTH, maxsplit=1)[0]
    if not main.replace(SEGMENT, ""):
        return "must name at least one block" + (_pointer(text, [0]) if text else "")
    wrong = [index for index, letter in enumerate(text) if letter not in (*LETTERS, SEGMENT, DEPTH)]
    if wrong:
        places = ", ".join(f"{text[index]!r} at position {index}" for index in wrong)
        return f"each letter must be known; found {places} (counted from 0)" + _pointer(text, wrong)
    bars = [index for index in range(len(main), len(text)) if text[index] == SEGMENT]
    if bars:
        rule = f"{SEGMENT} divides the main model only, not a multi-token-prediction depth"
        return f"{rule}; found it at position {bars[0]} (counted from 0)" + _pointer(text, bars)
    return _depth_fault(text)


def known_kinds(text: str) -> dict[int, LayerKind]:
    """Return the kind of each block of the main model whose letter is known, by its index.

    A faulty pattern is no error here: an unknown letter counts as a block.
    """
    return {index: LETTERS[letter] for index, letter in enumerate(_blocks(text)) if letter in LETTERS}


def count_blocks(text: str) -> int:
    """Return the number of blocks of the main model; an unknown letter counts as one."""
    return len(_blocks(text))


def known_mtp_kinds(text: str) -> dict[int, LayerKind]:
    """Return the kind of each block of the first multi-token-prediction depth whose letter is known, by its index."""
    depths = text.split(DEPTH)[1:]
    return {index: LETTERS[letter] for index, letter in enumerate(depths[0] if depths else "") if letter in LETTERS}


def allocate_pattern(num_layers: int, *, attention_ratio: float, mlp_ratio: float) -> str:
    """Spread attention, then MLP blocks, evenly over a Mamba-2 model.

    Args:
        num_layers: Blocks of the whole model.
        attention_ratio: Share of them that is attention.
        mlp_ratio: Share of them that is MLP.

    Returns:
        A pattern of ``M``, ``*`` and ``-`` without separators.

    Raises:
        ValueError: if the shares are negative or leave no room.

    Source: the ratios of Megatron-Core 0.16 (``--hybrid-attention-ratio``, ``--hybrid-mlp-ratio``).
    """
    if num_layers < 1:
        raise ValueError(f"num_layers must be positive, got {num_layers}")
    if min(attention_ratio, mlp_ratio) < 0 or attention_ratio + mlp_ratio > 1:
        raise ValueError(
            f"attention_ratio and mlp_ratio must not be negative and add up to at most 1, "
            f"got {attention_ratio} and {mlp_ratio}"
        )
    letters = [LayerKind.mamba] * num_layers
    num_attention, num_mlps = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
    if num_attention + num_mlps > num_layers:
        raise ValueError(f"{num_attention} attention and {num_mlps} MLP blocks do not fit in {num_layers} layers")
    num_mamba = num_layers - num_attention
    # Equal runs of Mamba before, between and after the attention blocks; MLPs end the runs that they make.
    _spread(letters, LayerKind.attention, run=num_mamba / (num_attention + 1), count=num_attention)
    if num_mlps:
        _spread(letters, LayerKind.mlp, run=(num_mamba - num_mlps) / num_mlps, count=num_mlps)
    return "".join(letters)


def _spread(letters: list[LayerKind], kind: LayerKind, *, run: float, count: int) -> None:
    """Turn ``count`` of the Mamba blocks into ``kind``, after ``run`` others each, rounded so that they stay even."""
    left = run
    for index in [index for index, letter in enumerate(letters) if letter is LayerKind.mamba]:
        if left < 0.5 and count:
            letters[index] = kind
            left += run
            count -= 1
        else:
            left -= 1


def _kinds(letters: str) -> tuple[LayerKind, ...]:
    return tuple(LETTERS[letter] for letter in letters)


def _blocks(text: str) -> str:
    return text.split(DEPTH, maxsplit=1)[0].replace(SEGMENT, "")


def _depth_fault(text: str) -> str:
    """Every part after a ``/`` must have blocks, and those of the first."""
    parts = list(_depths(text))
    for start, part in parts:
        if not part:
            return (
                f"a multi-token-prediction depth must name at least one block; found none after position {start - 1}"
                + (_pointer(text, [start - 1]))
            )
    for start, part in parts[1:]:
        first = parts[0][1]
        if part != first:
            differs = next((i for i, pair in enumerate(zip(part, first, strict=False)) if pair[0] != pair[1]), None)
            place = start + (min(len(part), len(first)) if differs is None else differs)
            rule = f"all multi-token-prediction depths must be alike; the first is {first!r}, found {part!r}"
            return f"{rule}, which differs at position {place} (counted from 0)" + _pointer(text, [place])
    return ""


def _depths(text: str) -> Iterator[tuple[int, str]]:
    """Yield where the letters of each depth start, and the letters."""
    start = text.find(DEPTH) + 1
    while start:
        end = text.find(DEPTH, start)
        yield start, text[start:] if end < 0 else text[start:end]
        start = end + 1


def _pointer(text: str, places: list[int]) -> str:
    marks = "".join("^" if index in places else " " for index in range(max(places) + 1))
    return f"\n          {text}\n          {marks}"
