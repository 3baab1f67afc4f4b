"""Portable random bytes for stochastic rounding: a pure integer hash, never a generator with a state.

The byte of an element depends on (seed, layer, operand, step) and on the element's global row and column, so a
sharded run, a resumed run and a run on another device round alike. One 32-bit word serves four neighbouring columns,
eight bits each.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
# Odd constants with good avalanche: splitmix64 (Steele, Lea, Flood 2014) for rows, lowbias32 (Wellons 2018) for words.
_ROW_INCREMENT = 0x9E3779B97F4A7C15
_ROW_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_ENDLESS = 1 << 62


# So that a segment holds whole blocks of tokens (rows), and no word is shared by two segments (columns).
_ROW_MULTIPLE, _COLUMN_MULTIPLE = 16, 4


@dataclass(frozen=True)
class RandomStream:
    """Where the random bytes of one quantization come from.

    A matrix that holds, of each of several sequences, only a slice has rows (or columns) in segments: its row r is the
    global row ``row_offset + (r // row_segment) * row_stride + r % row_segment``, and likewise for columns.

    Args:
        key: 64-bit key, see `stream_key`.
        row_offset: Global row of the quantized matrix's first row.
        column_offset: Global column of its first column; a multiple of 4, so that no word is shared by two shards.
        row_segment: Rows that follow each other globally too, a multiple of 16; 0 is all of them.
        row_stride: From the first global row of a segment to that of the next; 0 without segments.
        column_segment: Columns that follow each other globally too, a multiple of 4; 0 is all of them.
        column_stride: From a segment's first global column to that of the next, a multiple of 4; 0 without segments.

    Raises:
        ValueError: for an offset that is negative or not such a multiple; for segments that are no such multiple or
        would overlap, and for a stride without segments.
    """

    key: int
    row_offset: int = 0
    column_offset: int = 0
    row_segment: int = 0
    row_stride: int = 0
    column_segment: int = 0
    column_stride: int = 0

    def __post_init__(self) -> None:
        if self.row_offset < 0 or self.column_offset < 0:
            raise ValueError(f"offsets must not be negative, found {self.row_offset} and {self.column_offset}")
        if self.column_offset % _COLUMN_MULTIPLE:
            raise ValueError(f"column_offset must be a multiple of 4, found {self.column_offset}")
        _check_segments("row", self.row_segment, self.row_stride, _ROW_MULTIPLE)
        _check_segments("column", self.column_segment, self.column_stride, _COLUMN_MULTIPLE)


@dataclass(frozen=True)
class TensorStream:
    """A RandomStream as int64 0-dim tensors, which a compiled function takes as inputs.

    Numbers would be constants of the compiled code, which every step would compile anew.
    """

    key: Tensor
    rows: Tensor
    words: Tensor

    @classmethod
    def of(cls, stream: RandomStream, *, device: torch.device) -> "TensorStream":
        """Put a stream on a device."""
        numbers = [_signed(stream.key), *_row_places(stream), *_word_places(stream)]
        on_device = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
        return cls(on_device[0], on_device[1:4], on_device[4:])


def stream_key(*, seed: int, layer: str, operand: str, step: int) -> int:
    """Return the 64-bit key of one operand of one layer in one step; the same in every process and on every machine."""
    text = f"{seed}\0{layer}\0{operand}\0{step}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bytes(
    stream: RandomStream | TensorStream, rows: int, columns: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return uniform bytes, uint8 [rows, columns]; byte c % 4 of word (row, c // 4) is for global column c."""
    key, row_places, word_places = (
        (stream.key, stream.rows, stream.words)
        if isinstance(stream, TensorStream)
        else (_signed(stream.key), _row_places(stream), _word_places(stream))
    )
    row = _global_index(torch.arange(rows, dtype=torch.int64, device=device), row_places)
    word = _global_index(torch.arange((columns + 3) // 4, dtype=torch.int64, device=device), word_places)
    row_key = _mix_row(key, row).unsqueeze(1)
    words = _mix_word(word.unsqueeze(0), row_key & _MASK_32, _shift_right(row_key, 32))  # [rows, words]
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=device)
    return ((words.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(1)[:, :columns].contiguous()


def _check_segments(name: str, segment: int, stride: int, multiple: int) -> None:
    if segment == 0 and stride == 0:
        return
    if segment <= 0 or segment % multiple:
        raise ValueError(f"{name}_segment must be a positive multiple of {multiple}, found {segment}")
    if stride < segment or (name == "column" and stride % multiple):
        rule = f"at least {name}_segment = {segment}" + (f" and a multiple of {multiple}" if name == "column" else "")
        raise ValueError(f"{name}_stride must be {rule}, found {stride}")


def _row_places(stream: RandomStream) -> tuple[int, int, int]:
    """Offset, segment and stride of the rows; one segment without end is contiguous."""
    return stream.row_offset, stream.row_segment or _ENDLESS, stream.row_stride


def _word_places(stream: RandomStream) -> tuple[int, int, int]:
    """The same of the words, four columns each."""
    return stream.column_offset // 4, stream.column_segment // 4 or _ENDLESS, stream.column_stride // 4


def _global_index(local: Tensor, places: tuple[int, int, int] | Tensor) -> Tensor:
    offset, segment, stride = places
    return local // segment * stride + local % segment + offset


def _mix_row(key: int | Tensor, row: Tensor) -> Tensor:
    """Hash (key, row) to 64 bits; int64 wraps around, as unsigned arithmetic does."""
    state = (row + 1) * _signed(_ROW_INCREMENT) + key
    state = (state ^ _shift_right(state, 30)) * _signed(_ROW_MULTIPLIERS[0])
    state = (state ^ _shift_right(state, 27)) * _signed(_ROW_MULTIPLIERS[1])
    return state ^ _shift_right(state, 31)


def _mix_word(word: Tensor, row_key_low: Tensor, row_key_high: Tensor) -> Tensor:
    """Hash a word index under a row key to 32 bits; the second key half enters between the rounds.

    With one half only, two rows whose keys differ by a small number would get the same words, shifted.
    """
    state = (word + row_key_low) & _MASK_32
    state = ((state ^ (state >> 16)) * _WORD_MULTIPLIERS[0]) & _MASK_32
    state = ((state ^ (state >> 15)) + row_key_high) & _MASK_32
    state = (state * _WORD_MULTIPLIERS[1]) & _MASK_32
    return state ^ (state >> 16)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Shift int64 right filling with zeros."""
    return (state >> bits) & (_MASK_64 >> bits)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value
