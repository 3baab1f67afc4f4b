"""The engine made of DeepSpeed's ZeRO, stages 1 to 3.

DeepSpeed runs in FP32: model code casts each weight to the compute dtype itself, so that the small modules see FP32
values, the quantizer sees the BF16 cast of the master, and gradients of weights are FP32, as in the torch engine.
Stage 3 sends weights in the dtype of that cast, which changes no value that a Linear computes with. Gradients are
summed over ranks and not averaged: the loss is divided by the number of labels of all ranks already.
"""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nvfp4_train.checkpoint.folder import read_info
from nvfp4_train.checkpoint.load import check_engine, check_same_shapes
from nvfp4_train.checkpoint.save import save_files
from nvfp4_train.checkpoint.state import common_tensors
from nvfp4_train.checkpoint.zero_files import (
    ADAMW_STATE,
    COMMON,
    TAG,
    Layout,
    Piece,
    locate,
    read_header,
    read_parameters,
    write_file,
)
from nvfp4_train.config.engine import LAST_STAGE, DeepSpeedEngineConfig, OffloadDevice
from nvfp4_train.data.batch import Batch
from nvfp4_train.data.write import sync_directory
from nvfp4_train.engine.base import BaseEngine
from nvfp4_train.model.block import Block
from nvfp4_train.model.hybrid import HybridLM
from nvfp4_train.optim.update import set_schedule
from nvfp4_train.parallel.extra_losses import ExtraLosses
from nvfp4_train.parallel.fsdp import parameters_in_compute_dtype
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.runner import model_inputs
from nvfp4_train.parallel.runtime import announce_local_rank
from nvfp4_train.precision.coverage import PrecisionPlan


class DeepSpeedEngine(BaseEngine):
    """See `Engine`. Other than there, a step waits for the device: DeepSpeed looks at the gradient norm.

    Args:
        model: Plain, with values, on its device; DeepSpeed takes its parameters over.
        optimizer: From `build_stateless`.
        mesh: Of all ranks, which all share the data axes.
        plan: Of the precision pass; this engine alone moves its position.
        cfg: How DeepSpeed shards and offloads.
        max_grad_norm: Largest global gradient norm; 0 does not clip.
    """

    name = "deepspeed"

    def __init__(
        self,
        model: HybridLM,
        *,
        optimizer: Optimizer,
        mesh: Mesh,
        plan: PrecisionPlan,
        cfg: DeepSpeedEngineConfig,
        max_grad_norm: float,
    ) -> None:
        super().__init__(model, optimizer=optimizer, mesh=mesh, plan=plan)
        self._deepspeed = _start_deepspeed(mesh.device)
        for block in _blocks_run_once(model):
            self._deepspeed.utils.set_z3_leaf_module(block, True)
        self._zero, *_ = self._deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config(cfg, max_grad_norm=max_grad_norm),
            dist_init_required=False,
        )
        groups = [dict(group) for group in self._zero._get_zero_param_shapes()]
        self._layout = Layout(stage=cfg.zero_stage, num_ranks=mesh.dp_degree, groups=groups)
        self._loss_factor = 1
        self._sent_rounded: list[nn.Parameter] = []
        if cfg.zero_stage == LAST_STAGE:
            # It always averages, but undoes a loss scale after that: 1 / ranks, which the loss takes back.
            self._loss_factor = mesh.dp_degree
            self._zero.optimizer.override_loss_scale(1 / mesh.dp_degree)
            # Those that stay gathered are sent once a step: they are small.
            weights = parameters_in_compute_dtype(model)
            self._sent_rounded = [parameter for parameter in weights if not parameter.ds_persist]  # type: ignore[attr-defined]
            self._send_weights_in(model.compute_dtype)
        # A script that would be copied into each checkpoint: at a full disk rank 0 alone would fail.
        self._zero._copy_recovery_script = lambda save_path: None

    def forward_backward(self, batches: list[Batch], denominator: Tensor) -> Tensor:
        """Add up the gradients of one step; see `Engine`."""
        total = torch.zeros((), device=self.mesh.device)
        extra = ExtraLosses()
        for index, batch in enumerate(batches):
            self._zero.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss_sum = self._run_forward(batch)
            self._zero.backward(loss_sum / denominator * self._loss_factor, scale_wrt_gas=False)
            total += loss_sum.detach()
            extra.add(self.model.extra_losses)
        total, self.extra_losses = extra.reduce(total, sum_over_data=self.mesh.sum_over_tokens)
        return total / denominator

    def optimizer_step(self, *, lr: float, weight_decay: float) -> Tensor:
        """Clip the gradients, update the parameters and forget the gradients; see `Engine`."""
        set_schedule(self._optimizer, lr=lr, weight_decay=weight_decay)
        self._zero.step()  # which leaves everything as it was where the norm is not finite
        norm = torch.as_tensor(self._zero.get_global_grad_norm(), dtype=torch.float32, device=self.mesh.device)
        self._end_step(skip=(~norm.isfinite()).to(torch.float32))
        return norm

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        """Save a checkpoint; see `Engine`."""
        save_files(path, self._write, engine=self.name, step=self.step, metadata=metadata)

    def load(self, path: Path) -> dict[str, Any]:
        """Continue from a checkpoint of any stage and number of ranks; see `Engine`."""
        info = read_info(path)
        check_engine(path, info, engine=self.name)
        header = read_header(path)
        common = common_tensors(self.model)
        shapes = {name: shape for group in self._layout.groups for name, shape in group.items()}
        check_same_shapes(path, header.shapes, shapes | {name: tensor.shape for name, tensor in common.items()})
        with self._shards() as flats:
            pieces = locate(self._layout, rank=self.mesh.dp_rank)
            for name, whole in read_parameters(path, header):
                self._put(whole, piece=pieces[name], flat=flats[pieces[name].group])
        for name, tensor in common.items():
            tensor.copy_(header.common[name])
        self.step = info.step
        self._position.weights_changed()
        return info.metadata

    def close(self) -> None:
        """Free what DeepSpeed holds; the model cannot be used afterwards."""
        self._zero.destroy()

    def _write(self, folder: Path) -> None:
        """Write this rank's files.

        DeepSpeed waits for all ranks after it wrote: a rank that cannot write has to come along.
        """
        writer = _DurableWriter(self._zero.checkpoint_engine)
        self._zero.checkpoint_engine = writer
        try:
            self._zero.save_checkpoint(
                str(folder), tag=TAG, client_state={COMMON: common_tensors(self.model)}, save_latest=False
            )
        finally:
            self._zero.checkpoint_engine = writer.engine
        if writer.problem is not None:
            raise writer.problem
        sync_directory(folder / TAG)

    @contextmanager
    def _shards(self) -> Iterator[list[Tensor]]:
        """Let this rank's flat masters be changed inside the block; afterwards the parameters follow them."""
        zero = self._zero.optimizer
        if self._layout.stage != LAST_STAGE:
            yield zero.single_partition_of_fp32_groups
            zero.update_lp_params()
            return
        zero.checkpoint_event_prologue()  # parameters that stay gathered are sharded for once
        yield zero.fp32_partitioned_groups_flat
        for index in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        zero.checkpoint_event_epilogue()

    @torch.no_grad()
    def _put(self, whole: dict[str, Tensor], *, piece: Piece, flat: Tensor) -> None:
        """Copy this rank's piece of a parameter and of its optimizer state into the flat tensors of its group."""
        piece.of_rank(flat).copy_(piece.of_whole(whole["master"]))
        state = self._optimizer.state[flat]
        # A copy: a converted checkpoint has one for all groups, and each group counts on its own.
        state["step"] = whole["step"].to(flat.device, copy=True)
        for key in ADAMW_STATE:
            if key not in state:
                state[key] = torch.zeros_like(flat)
            piece.of_rank(state[key]).copy_(piece.of_whole(whole[key]))

    @contextmanager
    def _writable_parameters(self) -> Iterator[None]:
        """Let the parameters be read and changed inside the block, in the same way on every rank."""
        parameters = list(self.model.parameters())
        self._send_weights_in(torch.float32)
        with self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            yield
        self._send_weights_in(self.model.compute_dtype)
        self._zero.optimizer.refresh_fp32_params()

    def _send_weights_in(self, dtype: torch.dtype) -> None:
        """Say in which dtype ranks send each other the weights of Linears; they arrive in FP32, as their shards are.

        DeepSpeed has this for `torch.autocast`, whose other parts would round gradients of weights and what the small
        modules compute: only what it notes on a parameter is used.
        """
        for parameter in self._sent_rounded:
            setattr(parameter, self._deepspeed.runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME, dtype)

    def _run_forward(self, batch: Batch) -> Tensor:
        loss_sum: Tensor = self._zero(**model_inputs(self._start(batch)))
        return loss_sum


class _DurableWriter:
    """Stands in for what writes DeepSpeed's files: they are on disk when it returns, and it keeps its first problem.

    Args:
        engine: DeepSpeed's own, which does all the rest.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.problem: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        try:
            write_file(state_dict, Path(path))
        except (OSError, RuntimeError) as error:
            self.problem = self.problem or error


def _blocks_run_once(model: HybridLM) -> list[Block]:
    """Return the blocks that stage 3 gathers as one, as FSDP2 does.

    DeepSpeed reduces the gradients of such a module when its backward ends, once: blocks that several depths of
    multi-token prediction share are left out, and their modules are gathered one by one.
    """
    shared = set(model.mtp.modules()) if model.num_mtp_depths > len(model.mtp) else set()
    return [block for block in model.all_blocks() if block not in shared]


def deepspeed_config(cfg: DeepSpeedEngineConfig, *, max_grad_norm: float) -> dict[str, Any]:
    """Return what `deepspeed.initialize` is told."""
    zero = {
        "stage": cfg.zero_stage,
        "overlap_comm": cfg.overlap_comm,
        "reduce_bucket_size": cfg.reduce_bucket_size,
        "allgather_bucket_size": cfg.allgather_bucket_size,
        "stage3_prefetch_bucket_size": cfg.prefetch_bucket_size,
        "stage3_param_persistence_threshold": cfg.param_persistence_threshold,
        "offload_optimizer": _device(cfg.offload_optimizer),
        "offload_param": _device(cfg.offload_param),
    }
    return {
        # The engine says itself which microbatch is the last of a step, and divides the loss itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "gradient_allreduce_op": "mean" if cfg.zero_stage == LAST_STAGE else "sum",
        # PyTorch's AdamW, on the host too: DeepSpeed's own needs a compiler at run time.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
        "steps_per_print": None,
    }


def _device(device: OffloadDevice) -> dict[str, str] | None:
    return None if device is OffloadDevice.none else {"device": device.value}


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed, without its words about the machine.

    Raises:
        ValueError: if it is not installed.
    """
    logging.disable(logging.WARNING)  # on a machine without a GPU the import says so
    try:
        return importlib.import_module("deepspeed")
    except ImportError as error:
        raise ValueError(
            f"engine=deepspeed needs DeepSpeed, which cannot be imported: {error}\n"
            "    fix: pip install 'nvfp4-train[deepspeed]', or use engine=torch"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _start_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed, and let it use the process group that exists.

    Raises:
        ValueError: if it is not installed, or computes on another kind of device.
    """
    deepspeed = import_deepspeed()
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise ValueError(
            f"run.device: this rank computes on {device.type}, DeepSpeed on {found}\n"
            f"    fix: set DS_ACCELERATOR={device.type} in the environment of the launcher, or use run.device={found}"
        )
    # DeepSpeed 0.19 compiles shared-memory collectives for CPUs whenever it meets a process group, and fails without a
    # compiler; gloo does without them. https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/comm/torch.py
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    # Of torch 2.13, at every collective of DeepSpeed 0.19, which still uses the old names.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
    announce_local_rank()
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed
