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


@dataclass(frozen=True)
class RandomStream:
    """Where the random bytes of one quantization come from.

    Args:
        key: 64-bit key, see `stream_key`.
        row_offset: Global row of the quantized matrix's first row.
        column_offset: Global column of its first column; a multiple of 4, so that no word is shared by two shards.

    Raises:
        ValueError: for an offset that is negative, or a column offset that is not a multiple of 4.
    """

    key: int
    row_offset: int = 0
    column_offset: int = 0

    def __post_init__(self) -> None:
        if self.row_offset < 0 or self.column_offset < 0:
            raise ValueError(f"offsets must not be negative, found {self.row_offset} and {self.column_offset}")
        if self.column_offset % 4:
            raise ValueError(f"column_offset must be a multiple of 4, found {self.column_offset}")


@dataclass(frozen=True)
class TensorStream:
    """A RandomStream as int64 0-dim tensors, which a compiled function takes as inputs.

    Numbers would be constants of the compiled code, which every step would compile anew.
    """

    key: Tensor
    row_offset: Tensor
    word_offset: Tensor

    @classmethod
    def of(cls, stream: RandomStream, *, device: torch.device) -> "TensorStream":
        """Put a stream on a device."""
        numbers = [_signed(stream.key), stream.row_offset, stream.column_offset // 4]
        key, row_offset, word_offset = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
        return cls(key, row_offset, word_offset)


def stream_key(*, seed: int, layer: str, operand: str, step: int) -> int:
    """Return the 64-bit key of one operand of one layer in one step; the same in every process and on every machine."""
    text = f"{seed}\0{layer}\0{operand}\0{step}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bytes(
    stream: RandomStream | TensorStream, rows: int, columns: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return uniform bytes, uint8 [rows, columns]; byte c % 4 of word (row, c // 4) is for global column c."""
    words_per_row = (columns + 3) // 4
    row = torch.arange(rows, dtype=torch.int64, device=device) + stream.row_offset
    key, word_offset = (
        (stream.key, stream.word_offset)
        if isinstance(stream, TensorStream)
        else (_signed(stream.key), stream.column_offset // 4)
    )
    word = torch.arange(words_per_row, dtype=torch.int64, device=device) + word_offset
    row_key = _mix_row(key, row).unsqueeze(1)
    words = _mix_word(word.unsqueeze(0), row_key & _MASK_32, _shift_right(row_key, 32))  # [rows, words]
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=device)
    return ((words.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(1)[:, :columns].contiguous()


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
