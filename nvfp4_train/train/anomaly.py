"""Finds the layer where numbers stop being numbers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from nvfp4_train.checkpoint.ranks import gather_from_ranks
from nvfp4_train.data.batch import Batch
from nvfp4_train.engine.base import Engine, Forward
from nvfp4_train.precision.monitor import recorded_amax
from nvfp4_train.train.metrics import first_non_finite, is_finite

# Parts of a model as they run; of several ranks each may have some.
_ORDER = ("embedding", "blocks", "final_norm", "lm_head", "mtp")


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity; the message says where."""


def describe_cause(engine: Engine, batches: Iterable[Batch]) -> str:
    """Name the first layer and tensor that is not finite. Every rank has to call this, with as many batches.

    What the precision pass recorded of the last backward is read first. Then the forward passes are repeated with the
    present weights, which are those that the bad step started from: an update that is not finite is not applied.
    Ranks may hold other layers: what is named is the first that any of them found.
    """
    recorded = first_non_finite(recorded_amax(engine.model))
    findings: list[str] = []
    with _watched(engine.model, findings):
        for batch in batches:
            engine.evaluate(batch, forward=Forward.recipe)
    first = min(gather_from_ranks(findings[0] if findings else None), key=_place_in_forward)
    if first is not None:
        return f"first in the forward pass: {first}"
    last = max(gather_from_ranks(recorded), key=_place_in_backward)
    if last is not None:
        return f"first in the backward pass: {last}"
    return "every layer's forward pass is finite when it is repeated: the gradients overflow"


def _place_in_forward(name: str | None) -> tuple[int, int]:
    """Order names of layers as they run; no name comes last."""
    if name is None:
        return len(_ORDER), 0
    layer = name.partition(":")[0].partition(",")[0]  # "lm_head: dgrad.dy", "lm_head, operand x"
    part, _, rest = layer.partition(".")
    index = rest.partition(".")[0]
    return (_ORDER.index(part) if part in _ORDER else 0), (int(index) if index.isdecimal() else 0)


def _place_in_backward(name: str | None) -> tuple[int, int]:
    return (-1, 0) if name is None else _place_in_forward(name)


@contextmanager
def _watched(model: nn.Module, findings: list[str]) -> Iterator[None]:
    """Add a line to ``findings`` for each non-finite tensor that a leaf module meets inside the block."""
    handles = []
    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            handles.append(module.register_forward_pre_hook(_check_inputs(name, findings)))
            handles.append(module.register_forward_hook(_check_output(name, findings)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_inputs(name: str, findings: list[str]) -> Callable[[nn.Module, tuple[object, ...]], None]:
    def check(module: nn.Module, inputs: tuple[object, ...]) -> None:
        operands = {"x": inputs[0]} if inputs else {}
        operands |= dict(module.named_parameters(recurse=False))
        findings.extend(f"{name}, operand {key}" for key, value in operands.items() if _is_bad(value))

    return check


def _check_output(name: str, findings: list[str]) -> Callable[[nn.Module, tuple[object, ...], object], None]:
    def check(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:  # noqa: ARG001
        if _is_bad(output):
            findings.append(f"{name}, result y")

    return check


def _is_bad(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not is_finite(value)
