"""Compare the logits of a Hugging Face folder with those that are stored beside it."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nvfp4_train.export.huggingface import load_huggingface, load_tensors
from nvfp4_train.model.hybrid import build_model

REFERENCE = "reference.safetensors"


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far our logits are from the reference.

    Args:
        max_difference: Largest absolute difference of a logit; NaN if one is NaN.
        pattern: Of the model.
        num_tokens: Compared.
    """

    max_difference: float
    pattern: str
    num_tokens: int


@torch.no_grad()
def compare_logits(folder: Path, *, dt_min: float | None = None, dtype: torch.dtype = torch.float32) -> Parity:
    """Compute the logits of ``input_ids`` in ``reference.safetensors`` and compare them with ``logits`` there.

    Args:
        folder: ``config.json``, weights and ``reference.safetensors`` with ``input_ids`` [B, S] and ``logits``
            [B, S, V].
        dt_min: Floor of dt; None: that of transformers 5.18, which is ``time_step_min`` for NemotronH and the lower
            ``time_step_limit`` for Mamba2.
        dtype: To compute in.

    Raises:
        ValueError: for a folder that lacks something, or holds a model that ours is not.
    """
    loaded = load_huggingface(folder)
    cfg = loaded.cfg
    if dt_min is not None:
        cfg = replace(cfg, mamba=replace(cfg.mamba, dt_min=dt_min))
    reference = load_tensors(folder / REFERENCE)
    for name in ("input_ids", "logits"):
        if name not in reference:
            raise ValueError(f"{folder / REFERENCE} holds no tensor {name!r}, only {', '.join(sorted(reference))}")
    tokens, wanted = reference["input_ids"].to(torch.int64), reference["logits"]
    if wanted.shape != (*tokens.shape, cfg.vocab_size):
        raise ValueError(
            f"{folder / REFERENCE}: logits must be {(*tokens.shape, cfg.vocab_size)}, found {tuple(wanted.shape)}"
        )
    model = build_model(cfg)
    model.load_state_dict(loaded.state)
    model.to(dtype)
    model.compute_dtype = dtype
    logits = model(tokens, document_ids=torch.zeros(tokens.shape, dtype=torch.int32))
    difference = (logits.double() - wanted.double()).abs().max()
    return Parity(max_difference=difference.item(), pattern=cfg.pattern, num_tokens=tokens.numel())
