"""What a block does to one token on one rank: products by precision, passes that quantize, and other memory traffic.

Products come from the modules; traffic is that of fused kernels, which read and write each activation once per
operation that needs it. How often that is for each kind of block is written down here: it is modelled.
"""

from dataclasses import dataclass, field

from torch import nn

from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import BlockKey, local_block, local_ends
from nvfp4_train.config.model import ModelConfig
from nvfp4_train.config.moe import Activation
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.config.recipe import LinearRecipe, RecipeConfig
from nvfp4_train.model.flops import FLASH_BACKWARD, Product, count_flops
from nvfp4_train.model.peaks import Precision
from nvfp4_train.numerics.spec import FOUR_BIT_FORMATS, Format, OperandSpec
from nvfp4_train.precision.coverage import gemm_precisions
from nvfp4_train.precision.experts import QuantizedExperts
from nvfp4_train.precision.linear import QuantizedLinear
from nvfp4_train.precision.weight_cache import is_shared

ACTIVATION_BYTES = 2  # BF16
GEMM_OPERANDS = {
    "fprop": ("fprop.x", "fprop.w"),
    "dgrad": ("dgrad.dy", "dgrad.w"),
    "wgrad": ("wgrad.x", "wgrad.dy"),
}


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One of the three products of a Linear.

    Args:
        name: fprop, dgrad or wgrad.
        speed: By its wider operand.
        formats: Of its two operands.
    """

    name: str
    speed: Precision
    formats: tuple[Format, Format]


@dataclass(frozen=True, kw_only=True)
class LinearWork:
    """A Linear, or the experts' Linears of a rank.

    Args:
        name: In its block.
        inputs: in_features.
        outputs: out_features.
        rows_per_token: Rows that a token makes: 1, or the experts that it goes to.
        num_weights: 1, or the experts of a rank.
        gemms: Its three products.
        quantized_bytes: Bytes that quantizing moves for each element of x, of dy, and of the weight once per step.
    """

    name: str
    inputs: int
    outputs: int
    rows_per_token: int
    num_weights: int
    gemms: tuple[Gemm, ...]
    quantized_bytes: tuple[float, float, float]

    @property
    def flops(self) -> float:
        """Of one product, per token."""
        return 2.0 * self.inputs * self.outputs * self.rows_per_token

    @property
    def weight_elements(self) -> float:
        """Of all weights of the rank."""
        return float(self.inputs * self.outputs * self.num_weights)


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """Per token of a microbatch on one rank.

    Args:
        linears: Of the block.
        attention_flops: Forward; depends on the length of sequences.
        scan_flops: Forward, as executed.
        router_flops: Forward, in FP32.
        forward_bytes: Memory traffic besides products and quantization.
        backward_bytes: The same.
        backward_attention: Backward FLOPs for each of the forward.
    """

    linears: tuple[LinearWork, ...]
    attention_flops: float
    scan_flops: float
    router_flops: float
    forward_bytes: float
    backward_bytes: float
    backward_attention: float = FLASH_BACKWARD


@dataclass(kw_only=True)
class Work:
    """Looks at blocks and remembers what they do.

    Args:
        model: The whole model.
        recipe: Its recipe.
    """

    model: ModelConfig
    recipe: RecipeConfig
    _known: dict[tuple[object, ...], BlockWork] = field(default_factory=dict)

    def block(self, key: BlockKey, layout: Layout) -> BlockWork:
        """Return the work of one block."""
        what = (key, layout.tp, layout.ep, layout.sequence_length)
        if what not in self._known:
            self._known[what] = self._look(key, layout)
        return self._known[what]

    def ends(self, layout: Layout) -> list[LinearWork]:
        """Return the Linears outside blocks: the head, once a loss, and the projections of multi-token prediction."""
        built = local_ends(self.model, self.recipe, layout=layout, has_head=True).model
        depths = self.model.layer_pattern.num_mtp_depths
        found = _linears(built, layout)
        head = [work for work in found if work.name == "lm_head"] * (1 + depths)
        first_depth = [work for work in found if work.name == "mtp.0.eh_proj"]
        return head + first_depth * depths

    def _look(self, key: BlockKey, layout: Layout) -> BlockWork:
        model = local_block(key, self.model, self.recipe, layout=layout).model
        length = layout.sequence_length
        rows = count_flops(model, document_lengths=[length]).rows
        by_product = {
            product: sum(row.executed_forward for row in rows if row.product is product) / length for product in Product
        }
        forward, backward = _traffic(model.cfg, key.kind, layout)
        return BlockWork(
            linears=tuple(work for work in _linears(model, layout) if work.name.startswith("blocks.")),
            attention_flops=by_product[Product.attention],
            scan_flops=by_product[Product.scan],
            router_flops=by_product[Product.router],
            forward_bytes=forward,
            backward_bytes=backward,
        )


def _linears(model: nn.Module, layout: Layout) -> list[LinearWork]:
    found = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            rows, weights = module.uses_per_token, module.num_experts // layout.ep
        elif isinstance(module, QuantizedLinear):
            rows, weights = 1, 1
        else:
            continue
        recipe = module.precision.recipe
        found.append(
            LinearWork(
                name=name,
                inputs=module.in_features,
                outputs=module.out_features,
                rows_per_token=rows,
                num_weights=weights,
                gemms=tuple(_gemm(recipe, gemm) for gemm in GEMM_OPERANDS),
                quantized_bytes=_quantized_bytes(recipe),
            )
        )
    return found


def _gemm(recipe: LinearRecipe, name: str) -> Gemm:
    first, second = (recipe.operands[operand].format for operand in GEMM_OPERANDS[name])
    return Gemm(name=name, speed=gemm_precisions(recipe)[name], formats=(first, second))


def _bits(spec: OperandSpec) -> int:
    if spec.is_quantized:
        return 4 if spec.format in FOUR_BIT_FORMATS else 8
    return 32 if spec.format is Format.fp32 else 16


def stored_bytes(spec: OperandSpec) -> float:
    """Return the bytes of an element of a quantized operand, with its share of the block scale."""
    return _bits(spec) / 8 + (1 / spec.block_size if spec.block_size else 0.0)


def weight_bytes(recipe: LinearRecipe) -> float:
    """Return the bytes of an element of a weight that is kept quantized from one microbatch to the next."""
    specs = recipe.operands
    names = ("fprop.w",) if is_shared(specs) else ("fprop.w", "dgrad.w")
    return sum(stored_bytes(specs[name]) for name in names if specs[name].is_quantized)


def _quantized_bytes(recipe: LinearRecipe) -> tuple[float, float, float]:
    specs = recipe.operands
    weights = ["fprop.w"] if is_shared(specs) else ["fprop.w", "dgrad.w"]
    groups = (["fprop.x", "wgrad.x"], ["dgrad.dy", "wgrad.dy"], weights)
    x, dy, w = ([specs[name] for name in names if specs[name].is_quantized] for names in groups)
    return _passes(x), _passes(dy), _passes(w)


def _passes(specs: list[OperandSpec]) -> float:
    """One pass reads the tensor and writes its operands; where a scale needs maxima, one before it looks for them."""
    if not specs:
        return 0.0
    reads = 1 + any(spec.has_amax and not spec.amax_history_length for spec in specs)
    return reads * ACTIVATION_BYTES + sum(stored_bytes(spec) for spec in specs)


def _traffic(cfg: ModelConfig, kind: LayerKind, layout: Layout) -> tuple[float, float]:
    """Bytes that fused kernels move besides products and quantization, per token: forward, backward."""
    width = cfg.d_model / (layout.tp if layout.sequence_parallel else 1)
    # norm and residual: read the stream and the mixer's result, write the sum and the normed; backward reads more
    forward, backward = 4 * width, 5 * width
    match kind:
        case LayerKind.mlp:
            forward, backward = _add_mlp(forward, backward, cfg.mlp.d_ff, cfg.mlp.activation)
        case LayerKind.attention:
            heads = (cfg.attention.num_heads + 2 * cfg.attention.num_kv_heads) * cfg.attention.d_head
            forward, backward = forward + 2 * heads, backward + 4 * heads
        case LayerKind.mamba:
            mamba = cfg.mamba
            mixed = mamba.d_inner + 2 * mamba.num_groups * mamba.d_state
            states = mamba.d_inner * mamba.d_state / mamba.chunk_size
            # convolution; scan with its states in two passes; gated norm
            forward += 2 * mixed + (mixed + mamba.d_inner) + 4 * states + 3 * mamba.d_inner
            backward += 4 * mixed + 3 * (mixed + mamba.d_inner) + 8 * states + 5 * mamba.d_inner
        case LayerKind.moe:
            moe = cfg.moe
            routed = moe.top_k * (moe.d_latent or cfg.d_model)
            forward, backward = forward + 4 * routed, backward + 4 * routed
            forward += 8 * moe.num_experts / ACTIVATION_BYTES
            forward, backward = _add_mlp(forward, backward, moe.top_k * moe.d_ff + moe.shared_d_ff, moe.activation)
    return ACTIVATION_BYTES * forward, ACTIVATION_BYTES * backward


def _add_mlp(forward: float, backward: float, width: float, activation: Activation) -> tuple[float, float]:
    inputs = 2 if activation is Activation.swiglu else 1
    return forward + (inputs + 1) * width, backward + (2 * inputs + 1) * width
