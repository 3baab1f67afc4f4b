"""Seconds of a step on named hardware: a model with few constants, which `calibration` holds against published runs."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields

from nvfp4_train.analysis.plan.communication import Link, Traffic
from nvfp4_train.analysis.plan.hardware import Hardware
from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.local import BlockKey
from nvfp4_train.analysis.plan.pipeline import bubble
from nvfp4_train.analysis.plan.work import ACTIVATION_BYTES, BlockWork, LinearWork, Work
from nvfp4_train.config.parallel import ActivationCheckpoint
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.model.peaks import Precision

# Kernels of a block, forward and backward together, as fused implementations launch them.
KERNELS = {LayerKind.mamba: 40, LayerKind.attention: 30, LayerKind.mlp: 20, LayerKind.moe: 60}
OPTIMIZER_BYTES = 3 * 4 + 2 * 4 + 4  # AdamW in FP32 reads and writes masters and moments, and reads gradients


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the published peaks that real kernels reach; fitted, see calibration.yaml.

    Args:
        gemm_bf16: Of the BF16 peak, for a product so large that reading and writing do not count.
        gemm_fp8: Of the FP8 peak.
        gemm_fp4: Of the FP4 peak.
        gemm_memory: Of HBM bandwidth, for what products read and write.
        attention: Of the BF16 peak.
        scan: Of the BF16 peak.
        memory: Of HBM bandwidth, for traffic between products.
        quantize: Of HBM bandwidth, for passes that quantize.
        link: Of the bandwidth of a domain or a network.
        overlap: Of the time of computing that transfers can hide behind.
        kernel_seconds: Of the host or the device between two kernels.
        mamba: Factor on the traffic of convolution, scan and gated norm.
    """

    gemm_bf16: float
    gemm_fp8: float
    gemm_fp4: float
    gemm_memory: float
    attention: float
    scan: float
    memory: float
    quantize: float
    link: float
    overlap: float
    kernel_seconds: float
    mamba: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by what takes them, on the pipeline rank that is slowest.

    Args:
        gemm_fp4: Products with two 4-bit operands on 4-bit units.
        gemm_fp8: On 8-bit units.
        gemm_bf16: On 16-bit units, emulated formats and the router too.
        quantization: Passes over operands.
        attention: Scores and values.
        scan: Of Mamba-2.
        elementwise: Norms, activations, convolutions, residuals, routing.
        launches: Between kernels.
        transfers: Between ranks, where nothing hides them.
        optimizer: Its traffic, and quantizing weights.
        bubble: Waiting in the pipeline.
    """

    gemm_fp4: float
    gemm_fp8: float
    gemm_bf16: float
    quantization: float
    attention: float
    scan: float
    elementwise: float
    launches: float
    transfers: float
    optimizer: float
    bubble: float

    @property
    def by_part(self) -> dict[str, float]:
        """Seconds by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.by_part.values())


def step_time(
    blocks: list[BlockKey], ends: list[LinearWork], traffic: list[Traffic], *, layout: Layout, timer: "BlockTimer"
) -> StepTime:
    """Return the seconds of a step on a rank that holds these blocks.

    Args:
        blocks: Of the rank.
        ends: Linears outside blocks, if the rank has them.
        traffic: Of the rank in a step.
        layout: How ranks share the run.
        timer: Of blocks.
    """
    machine = timer.machine
    recomputes = layout.checkpoint is ActivationCheckpoint.block
    seconds: defaultdict[str, float] = defaultdict(float)
    for key, count in Counter(blocks).items():
        for part, value in timer.seconds(key, layout, recomputes=recomputes).items():
            seconds[part] += count * value
    for linear in ends:
        _add(seconds, machine.linear_seconds(linear, layout, recomputes=False))
    for part in seconds:
        seconds[part] *= layout.num_microbatches
    computing = sum(seconds.values())
    seconds["optimizer"] = machine.optimizer_seconds(blocks, ends, timer.work, layout)
    seconds["transfers"] = machine.exposed_seconds(traffic, computing=computing)
    seconds["bubble"] = bubble(layout) * (computing + machine.exposed_seconds(_in_line(traffic), computing=0.0))
    return StepTime(**{item.name: seconds[item.name] for item in fields(StepTime)})


def _add(seconds: defaultdict[str, float], more: dict[str, float]) -> None:
    for part, value in more.items():
        seconds[part] += value


def _in_line(traffic: list[Traffic]) -> list[Traffic]:
    return [item for item in traffic if not item.can_overlap]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """An accelerator and how much of it is reached."""

    hardware: Hardware
    efficiency: Efficiency

    def block_seconds(self, work: BlockWork, key: BlockKey, layout: Layout, *, recomputes: bool) -> dict[str, float]:
        """Return the seconds of a microbatch in one block, by part."""
        hardware, efficiency, tokens = self.hardware, self.efficiency, layout.tokens
        forwards = 2 if recomputes else 1
        seconds: defaultdict[str, float] = defaultdict(float)
        for linear in work.linears:
            _add(seconds, self.linear_seconds(linear, layout, recomputes=recomputes))
        flops = work.attention_flops * tokens * (forwards + work.backward_attention)
        seconds["attention"] += flops / (hardware.bf16 * efficiency.attention)
        seconds["scan"] += work.scan_flops * tokens * (forwards + 2) / (hardware.bf16 * efficiency.scan)
        seconds["gemm_bf16"] += 3 * work.router_flops * tokens / self._peak(Precision.fp32)
        moved = (work.forward_bytes * forwards + work.backward_bytes) * tokens
        if key.kind is LayerKind.mamba:
            moved *= efficiency.mamba
        seconds["elementwise"] += moved / (hardware.memory_bandwidth * efficiency.memory)
        seconds["launches"] += KERNELS[key.kind] * (forwards + 2) / 3 * efficiency.kernel_seconds
        return dict(seconds)

    def linear_seconds(self, linear: LinearWork, layout: Layout, *, recomputes: bool) -> dict[str, float]:
        """Return the seconds of a microbatch in one Linear: its three products and the passes that quantize."""
        hardware, efficiency = self.hardware, self.efficiency
        rows = linear.rows_per_token * layout.tokens
        seconds: defaultdict[str, float] = defaultdict(float)
        for gemm in linear.gemms:
            times = 2 if recomputes and gemm.name == "fprop" else 1
            speed = self.speed(gemm.speed, emulated=not set(gemm.formats) <= set(hardware.fp4_formats))
            seconds[_PART[speed]] += times * (
                linear.flops * layout.tokens / self._peak(speed)
                + _gemm_bytes(linear, gemm.name, speed=speed, rows=rows)
                / (hardware.memory_bandwidth * efficiency.gemm_memory)
            )
            is_emulated = speed is Precision.bf16 and gemm.speed is not Precision.bf16
            if is_emulated:  # codes are decoded before each product
                decoded = (ACTIVATION_BYTES + 0.5) * (rows * linear.inputs + linear.weight_elements)
                seconds["quantization"] += times * decoded / (hardware.memory_bandwidth * efficiency.memory)
        x, dy, _ = linear.quantized_bytes
        moved = rows * (x * linear.inputs * (2 if recomputes else 1) + dy * linear.outputs)
        seconds["quantization"] += moved / (hardware.memory_bandwidth * efficiency.quantize)
        return dict(seconds)

    def speed(self, wanted: Precision, *, emulated: bool) -> Precision:
        """Return the units that a product runs on: BF16 where the hardware has none of the format."""
        if wanted is Precision.fp4 and (self.hardware.fp4 is None or emulated):
            return Precision.bf16
        return Precision.bf16 if wanted is Precision.fp8 and self.hardware.fp8 is None else wanted

    def optimizer_seconds(self, blocks: list[BlockKey], ends: list[LinearWork], work: Work, layout: Layout) -> float:
        """Return the seconds of the update and of quantizing the weights once."""
        counted = Counter(blocks).items()
        linears = [(linear, count) for key, count in counted for linear in work.block(key, layout).linears]
        linears += [(linear, 1) for linear in ends]
        whole = sum(count * linear.weight_elements for linear, count in linears)
        codes = sum(count * linear.weight_elements * linear.quantized_bytes[2] for linear, count in linears)
        update = OPTIMIZER_BYTES * whole / layout.fsdp / (self.hardware.memory_bandwidth * self.efficiency.memory)
        return update + codes / (self.hardware.memory_bandwidth * self.efficiency.quantize)

    def exposed_seconds(self, traffic: list[Traffic], *, computing: float) -> float:
        """Return the seconds that a rank waits for others.

        All transfers that nothing hides, and what of the others is longer than the computing that they hide behind.
        """
        exposed = sum(self.seconds(item) for item in _in_line(traffic))
        hidden = sum(self.seconds(item) for item in traffic if item.can_overlap)
        return exposed + max(0.0, hidden - self.efficiency.overlap * computing)

    def seconds(self, item: Traffic) -> float:
        """Return the seconds of a transfer by itself."""
        bandwidth = self.hardware.domain_bandwidth if item.link is Link.domain else self.hardware.network
        return item.bytes / (bandwidth * self.efficiency.link)

    def _peak(self, speed: Precision) -> float:
        """FLOP/s that large products reach; FP32 runs at half the BF16 peak at most (TF32)."""
        hardware, efficiency = self.hardware, self.efficiency
        match speed:
            case Precision.fp4:
                return (hardware.fp4 or hardware.bf16) * efficiency.gemm_fp4
            case Precision.fp8:
                return (hardware.fp8 or hardware.bf16) * efficiency.gemm_fp8
            case Precision.bf16:
                return hardware.bf16 * efficiency.gemm_bf16
            case Precision.fp32:
                return hardware.bf16 / 2 * efficiency.gemm_bf16


_PART = {
    Precision.fp4: "gemm_fp4",
    Precision.fp8: "gemm_fp8",
    Precision.bf16: "gemm_bf16",
    Precision.fp32: "gemm_bf16",
}


def _gemm_bytes(linear: LinearWork, name: str, *, speed: Precision, rows: float) -> float:
    """Return what a product reads and writes: two operands in its format, the result in BF16, a dw in FP32."""
    width = {Precision.fp32: 4.0, Precision.bf16: 2.0, Precision.fp8: 1.0, Precision.fp4: 0.5625}[speed]
    x, dy = rows * linear.inputs, rows * linear.outputs
    match name:
        case "fprop":
            return width * (x + linear.weight_elements) + ACTIVATION_BYTES * dy
        case "dgrad":
            return width * (dy + linear.weight_elements) + ACTIVATION_BYTES * x
        case _:
            return width * (x + dy) + 4 * linear.weight_elements


@dataclass(kw_only=True)
class BlockTimer:
    """Times blocks and remembers it.

    Args:
        machine: That runs them.
        work: What they do.
    """

    machine: Machine
    work: Work
    _known: dict[tuple[object, ...], dict[str, float]] = field(default_factory=dict)

    def seconds(self, key: BlockKey, layout: Layout, *, recomputes: bool) -> dict[str, float]:
        """Return the seconds of a microbatch in one block, by part."""
        what = (key, layout.tp, layout.ep, layout.tokens, layout.sequence_length, recomputes)
        if what not in self._known:
            work = self.work.block(key, layout)
            self._known[what] = self.machine.block_seconds(work, key, layout, recomputes=recomputes)
        return self._known[what]
