"""Forward and backward of whole models next to transformers: speed, peak memory, and time per token by length.

    python benchmarks/model.py [--json FILE] [--quick] [--rounds 5] [--threads 2] [--parts hybrid mamba memory length]

The hybrid has the shape below in ours and in transformers' NemotronH; the Mamba model has 8 layers of the same widths.
Peers are as transformers makes them: their own chunk sizes, FP32 or BF16 autocast, labels given. Memory is measured in
a process of its own for each model: the largest resident set during the second step, less that of the process before
it built the model. It holds parameters, gradients and activations.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from race import Result, choose_clock, print_table, race, save
from torch import Tensor, nn

from nvfp4_train.config.load import load_config
from nvfp4_train.model.hybrid import build_model
from nvfp4_train.model.init import init_parameters
from nvfp4_train.precision.apply import apply_precision
from nvfp4_train.precision.position import RoundingPosition

WIDTHS = (
    "model.d_model=512", "model.vocab_size=8192", "model.mamba.num_heads=16", "model.mamba.d_head=64",
    "model.mamba.d_state=128", "model.mamba.num_groups=2", "model.attention.num_heads=8",
    "model.attention.num_kv_heads=2", "model.attention.d_head=64", "model.mlp.d_ff=2048",
)  # fmt: skip
PATTERNS = {"hybrid": "M-M*-M-M", "mamba": "MMMMMMMM"}
PEER_WIDTHS: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "n_groups": 2, "use_bias": False, "use_cache": False,
}  # fmt: skip
PEER_HYBRID: dict[str, Any] = {
    "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "ssm_state_size": 128, "mamba_num_heads": 16, "mamba_head_dim": 64,
    "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp", "mamba"],
}  # fmt: skip
PEER_MAMBA: dict[str, Any] = {
    "num_heads": 16, "head_dim": 64, "state_size": 128, "num_hidden_layers": 8, "tie_word_embeddings": False,
}  # fmt: skip
LENGTHS = (1024, 2048, 4096, 8192, 16384)
OURS = ("fp32", "bf16", "nvfp4")
MODELS = (*OURS, "transformers fp32", "transformers bf16")
MAMBA_MODELS = ("fp32", "bf16", "transformers fp32", "transformers bf16")
MIB = 2**20


def build_step(name: str, *, kind: str, size: int) -> Callable[[], object]:
    """Return forward and backward of one model on one sequence.

    Args:
        name: One of MODELS.
        kind: A key of PATTERNS.
        size: Tokens.
    """
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(8192, (1, size + 1), generator=rng)
    if name in OURS:
        return build_ours(name, kind=kind, tokens=tokens)
    return build_peer(kind=kind, tokens=tokens[:, :-1], in_bf16=name.endswith("bf16"))


def build_ours(recipe: str, *, kind: str, tokens: Tensor) -> Callable[[], object]:
    """Return a step of our model; weights are quantized anew in each, as in the first microbatch of a step."""
    cfg = load_config([f"recipe={recipe}", "model=demo", f"model.pattern={PATTERNS[kind]}", *WIDTHS]).cfg
    model = build_model(cfg.model)
    init_parameters(model, cfg.model, seed=0)
    position: RoundingPosition = apply_precision(model, cfg.recipe, seed=0).position
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    documents = torch.zeros_like(inputs)

    def step() -> None:
        position.weights_changed()
        model.zero_grad()
        (model(inputs, document_ids=documents, labels=labels) / labels.numel()).backward()

    return step


def build_peer(*, kind: str, tokens: Tensor, in_bf16: bool) -> Callable[[], object]:
    """Return a step of transformers' model."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: nn.Module
    if kind == "hybrid":
        model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**PEER_WIDTHS, **PEER_HYBRID))
    else:
        model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**PEER_WIDTHS, **PEER_MAMBA))
    model.train()

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if in_bf16 else nullcontext():
            loss = model(tokens, labels=tokens).loss
        loss.backward()

    return step


def present(names: Iterable[str]) -> list[str]:
    """Leave out peers where transformers is not installed."""
    return [name for name in names if name in OURS or find_spec("transformers") is not None]


def race_models(kind: str, names: Iterable[str], *, arguments: argparse.Namespace) -> list[Result]:
    """Time models side by side and print tokens/s by the last one's: the peer in BF16, where it is asked for."""
    names = present(names)
    reference = names[-1]
    clock = choose_clock(arguments.threads, cpu_time=arguments.cpu_time)
    steps = {name: build_step(name, kind=kind, size=arguments.tokens) for name in names}
    results = race(steps, references=(reference,), rounds=arguments.rounds, elements=arguments.tokens, clock=clock)
    print_table(f"{kind}: {arguments.tokens} tokens, {arguments.threads} threads", results)
    for result in results:
        speed = 1e9 * result.elements_per_second
        print(f"{result.name:20} {speed:8.0f} tokens/s, {1 / result.ratios[reference]:5.2f} x {reference}")
    return results


def race_lengths(arguments: argparse.Namespace) -> list[Result]:
    """Time per token of a model of Mamba layers only; the reference is the shortest sequence."""
    clock = choose_clock(arguments.threads, cpu_time=arguments.cpu_time)
    lengths = LENGTHS[:2] if arguments.quick else LENGTHS
    steps = {str(size): build_step("bf16", kind="mamba", size=size) for size in lengths}
    results = race(steps, references=(str(lengths[0]),), rounds=arguments.length_rounds, clock=clock)
    print("\nmamba, bf16: time per token by length")
    for size, result in zip(lengths, results, strict=True):
        per_token = result.ratios[str(lengths[0])] * lengths[0] / size
        print(f"{size:6} {1e3 * result.median_ms / size:8.1f} us, {per_token:5.2f} x {lengths[0]} tokens")
    return results


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak of one step.

    Args:
        name: Of the model.
        peak_mib: During the second step, less what the process had before the model.
    """

    name: str
    peak_mib: float


def resident_mib(field: str) -> float:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MIB


def print_peak(name: str, *, kind: str, size: int) -> None:
    """Print the peak memory of a step of one model, in MiB."""
    build_step(name, kind=kind, size=64)()  # libraries, thread pools
    before = resident_mib("VmRSS")
    step = build_step(name, kind=kind, size=size)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step()
    print(resident_mib("VmHWM") - before)


def measure_memory(arguments: argparse.Namespace) -> list[Memory]:
    """Run each model in a process of its own."""
    rows = []
    for kind in PATTERNS:
        for name in present(MODELS if kind == "hybrid" else MAMBA_MODELS):
            command = [sys.executable, __file__, "--peak", kind, name, "--tokens", str(arguments.tokens)]
            environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
            result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            rows.append(Memory(name=f"{kind} {name}", peak_mib=float(result.stdout.split()[-1])))
    peaks = {row.name: row.peak_mib for row in rows}
    print("\npeak memory of a step")
    for row in rows:
        kind, own = row.name.split()[0], row.name.split()[-1]
        peer = peaks.get(f"{kind} transformers {'fp32' if own == 'fp32' else 'bf16'}", float("nan"))
        print(f"{row.name:26} {row.peak_mib:8.0f} MiB, {row.peak_mib / peer:5.2f} x transformers")
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="time of one thread, for a busy machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--parts", nargs="*", default=("hybrid", "mamba", "memory", "length"))
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--peak", nargs=2, help="kind and model: print its peak memory only")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one round: whether it runs, not how fast")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.length_rounds, arguments.tokens = 1, 1, 128
    if arguments.peak:
        print_peak(arguments.peak[1], kind=arguments.peak[0], size=arguments.tokens)
        return
    tables: dict[str, list[Any]] = {}
    if "hybrid" in arguments.parts:
        tables["hybrid"] = race_models("hybrid", arguments.models, arguments=arguments)
    if "mamba" in arguments.parts:
        tables["mamba"] = race_models("mamba", MAMBA_MODELS, arguments=arguments)
    if "memory" in arguments.parts:
        tables["memory"] = measure_memory(arguments)
    if "length" in arguments.parts:
        tables["length"] = race_lengths(arguments)
    if arguments.json:
        save(arguments.json, tables)


if __name__ == "__main__":
    main()
