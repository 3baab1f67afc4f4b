"""Memory layouts of block scales that hardware GEMMs expect."""

import torch
from torch import Tensor

ATOM_ROWS, ATOM_COLUMNS = 128, 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Rearrange block scales [R, C] into cuBLAS's layout: atoms of 128 rows x 4 scales, contiguous.

    Args:
        scales: Any dtype [R, C], R a multiple of 128 and C of 4.

    Returns:
        The same shape and dtype; element (r, c) is at linear offset
        ((r/128 * C/4 + c/4) * 32 + r%32) * 16 + (r%128)/32 * 4 + c%4.

    Raises:
        ValueError: if the shape does not fill whole atoms; pad with `pad_scales` first.
    """
    _check_atoms(scales)
    rows, columns = scales.shape
    atoms = scales.view(rows // ATOM_ROWS, 4, 32, columns // ATOM_COLUMNS, ATOM_COLUMNS)
    return atoms.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzle_scales(swizzled: Tensor) -> Tensor:
    """Undo `swizzle_scales`."""
    _check_atoms(swizzled)
    rows, columns = swizzled.shape
    atoms = swizzled.view(rows // ATOM_ROWS, columns // ATOM_COLUMNS, 32, 4, ATOM_COLUMNS)
    return atoms.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def pad_scales(scales: Tensor) -> Tensor:
    """Pad block scales [R, C] with zeros to whole atoms."""
    rows, columns = scales.shape
    padding = (0, -columns % ATOM_COLUMNS, 0, -rows % ATOM_ROWS)
    return torch.nn.functional.pad(scales, padding)


def _check_atoms(scales: Tensor) -> None:
    if scales.dim() != 2 or scales.shape[0] % ATOM_ROWS or scales.shape[1] % ATOM_COLUMNS:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} do not fill atoms of {ATOM_ROWS} x {ATOM_COLUMNS}; pad_scales first"
        )
