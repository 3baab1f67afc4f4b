"""Floating-point operations of a step, from the modules that were built.

Counted are matrix products: those of Linears, experts, routers and the output head, of attention, and of the scan. A
multiply and an add are two operations. Norms, convolutions and activations are left out.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.model.attention import Attention
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.model.linear import GroupedLinear
from nvfp4_train.model.mamba2 import Scan
from nvfp4_train.model.peaks import Precision
from nvfp4_train.model.router import Router

GEMMS = 3  # fprop, dgrad and wgrad cost the same
FLASH_BACKWARD = 2.5  # a fused attention multiplies queries and keys once more in backward


class Product(StrEnum):
    """Where a product comes from."""

    linear = "linear"
    router = "router"
    attention = "attention"
    scan = "scan"


@dataclass(frozen=True, kw_only=True)
class FlopsRow:
    """The products of one module.

    Args:
        module: Its name in the model.
        product: What multiplies.
        forward: Operations that the mathematics of a forward needs.
        executed_forward: Operations that our forward executes: the scan multiplies whole chunks.
    """

    module: str
    product: Product
    forward: float
    executed_forward: float

    @property
    def executed_backward(self) -> float:
        """Operations that our backward executes, without a recomputed forward."""
        factor = FLASH_BACKWARD if self.product is Product.attention else 2
        return factor * self.executed_forward


@dataclass(frozen=True, kw_only=True)
class FlopsReport:
    """The products of all modules for the sequences that were asked for.

    Args:
        rows: One per module.
        num_tokens: Tokens of those sequences.
    """

    rows: list[FlopsRow]
    num_tokens: int

    @property
    def forward(self) -> float:
        """Model FLOPs of a forward."""
        return sum(row.forward for row in self.rows)

    @property
    def backward(self) -> float:
        """Model FLOPs of a backward: two products for each of the forward."""
        return 2 * self.forward

    @property
    def model(self) -> float:
        """Model FLOPs of forward and backward, whatever is recomputed."""
        return self.forward + self.backward

    @property
    def model_per_token(self) -> float:
        """Model FLOPs of forward and backward per token."""
        return self.model / self.num_tokens

    def hardware(self, checkpoint: ActivationCheckpoint) -> float:
        """Return the FLOPs that a step executes, with what is recomputed; selective recomputes no product."""
        total = sum(row.executed_forward + row.executed_backward for row in self.rows)
        if checkpoint is ActivationCheckpoint.block:
            total += sum(row.executed_forward for row in self.rows if "blocks." in row.module)
        return total

    def by_product(self) -> dict[Product, float]:
        """Return the model FLOPs of forward and backward by where they come from."""
        return {product: sum(GEMMS * row.forward for row in self.rows if row.product is product) for product in Product}

    def by_precision(
        self, gemms: Mapping[str, Mapping[str, Precision]], *, otherwise: Precision
    ) -> dict[Precision, float]:
        """Return the model FLOPs of forward and backward by what is multiplied; they add up to ``model``.

        Args:
            gemms: For each Linear by name, the precision of each of its three GEMMs; as in the coverage report.
            otherwise: Of every other product but those of routers, which are FP32.
        """
        amounts: Counter[Precision] = Counter()
        for row in self.rows:
            others = Precision.fp32 if row.product is Product.router else otherwise
            for precision in gemms.get(row.module, {}).values() or [others] * GEMMS:
                amounts[precision] += row.forward  # type: ignore[assignment]
        return dict(amounts)


def count_flops(model: HybridLM, *, document_lengths: Sequence[int]) -> FlopsReport:
    """Count the products of a step over one sequence.

    Args:
        model: Before it is sharded, on any device, meta included; before or after the precision pass.
        document_lengths: Tokens of the documents that the sequence holds; attention costs their squares.
    """
    num_tokens = sum(document_lengths)
    calls = {name: 1 for name, _ in model.named_modules()}
    for name in calls:
        if name.startswith("mtp.") and model.cfg.mtp.share_depths:
            calls[name] = model.num_mtp_depths
        if name == "lm_head":
            calls[name] = 1 + model.num_mtp_depths
    rows = [
        FlopsRow(
            module=name,
            product=product,
            forward=calls[name] * forward,
            executed_forward=calls[name] * (forward if executed is None else executed),
        )
        for name, module in model.named_modules()
        for product, forward, executed in _products(module, num_tokens=num_tokens, lengths=document_lengths)
    ]
    if model.lm_head is None:  # the embedding's weight is the output head
        forward = 2.0 * model.embedding.weight.numel() * num_tokens * (1 + model.num_mtp_depths)
        rows.append(FlopsRow(module="embedding", product=Product.linear, forward=forward, executed_forward=forward))
    return FlopsReport(rows=rows, num_tokens=num_tokens)


def _products(
    module: nn.Module, *, num_tokens: int, lengths: Sequence[int]
) -> Iterator[tuple[Product, float, float | None]]:
    """Yield the products of a module itself: FLOPs of the mathematics, and of our forward where those differ."""
    match module:
        case nn.Linear():
            yield Product.linear, 2.0 * module.in_features * module.out_features * num_tokens, None
        case GroupedLinear():
            per_token = 2.0 * module.in_features * module.out_features * module.uses_per_token
            yield Product.linear, per_token * num_tokens, None
        case Router():
            yield Product.router, 2.0 * module.weight.numel() * num_tokens, None
        case Attention():
            pairs = sum(_visible_pairs(length, window_tokens=module.cfg.window_tokens) for length in lengths)
            yield Product.attention, 4.0 * module.cfg.num_heads * module.cfg.d_head * pairs, None
        case Scan():
            cfg = module.cfg
            # The recurrence adds x b^T to the state of each head and reads it with c.
            forward = 4.0 * cfg.d_inner * cfg.d_state * num_tokens
            chunk = min(cfg.chunk_size, num_tokens)
            within = 2.0 * chunk * (cfg.num_groups * cfg.d_state + cfg.d_inner)  # scores, and scores times x
            padded = math.ceil(num_tokens / chunk) * chunk
            yield Product.scan, forward, (within + 4.0 * cfg.d_inner * cfg.d_state) * padded


def _visible_pairs(length: int, *, window_tokens: int) -> int:
    """Return the number of (query, key) pairs of a document that causal attention allows."""
    window = min(window_tokens or length, length)
    return window * (window + 1) // 2 + (length - window) * window
