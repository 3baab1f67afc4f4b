"""The Mamba-2 mixer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import MambaConfig, NormGroup
from nvfp4_train.model.conv import CausalConv1d
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.kernels.program import is_fused
from nvfp4_train.model.kernels.scan import SelectiveScan, selective_scan
from nvfp4_train.model.linear import Linear
from nvfp4_train.model.mamba_kernels import scan_kernel, sequence_index
from nvfp4_train.model.norm import GatedRMSNorm
from nvfp4_train.model.ssd import ScanInputs, scale_heads, ssd_scan


class Scan(nn.Module):
    """The selective scan with its per-head scalars: time step bias, decay rate and skip."""

    keep_fp32 = True

    def __init__(self, cfg: MambaConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.A_log = nn.Parameter(torch.empty(cfg.num_heads))
        self.D = nn.Parameter(torch.empty(cfg.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(cfg.num_heads))

    def forward(
        self,
        x: Tensor,
        *,
        b: Tensor,
        c: Tensor,
        dt: Tensor,
        documents: Documents,
        initial_state: Tensor | None = None,
    ) -> Tensor:
        """Scan one sequence per row.

        Args:
            x: [B, S, G, R, P]; R heads of each of G groups.
            b: [B, S, G, N].
            c: [B, S, G, N].
            dt: [B, S, G, R], before bias and softplus.
            documents: The state restarts in each, and comes from those that hold an earlier part of the rows.
            initial_state: [B, G, R, N, P] FP32 of each row's first document before its first token here; None: zeros.
                Rows that begin with a new document must have zeros.

        Returns:
            [B, S, G, R, P] in the dtype of ``x``.
        """
        kernel = scan_kernel(self.cfg, x)
        if kernel is not None and initial_state is None and documents.part is None:
            return self._scan_fused(kernel, x, b=b, c=c, dt=dt, documents=documents)
        if documents.part is None and is_fused(x):
            settings = SelectiveScan(
                document_ids=documents.ids,
                chunk_size=self.cfg.chunk_size,
                dt_min=self.cfg.dt_min,
                dt_max=self.cfg.dt_max,
            )
            scalars = (self.dt_bias, self.A_log, self.D)
            return selective_scan((x, b, c, dt), scalars, settings, initial_state=initial_state)
        y, _ = ssd_scan(
            self._inputs(x, b=b, c=c, dt=dt),
            document_ids=documents.ids,
            chunk_size=self.cfg.chunk_size,
            initial_state=initial_state,
            part=documents.part,
        )
        return (y + x * self.D.view(*x.shape[2:4], 1)).to(x.dtype)

    @torch.compiler.disable
    def _scan_fused(
        self, kernel: Callable[..., Tensor], x: Tensor, *, b: Tensor, c: Tensor, dt: Tensor, documents: Documents
    ) -> Tensor:
        """Do the same through ``mamba_chunk_scan_combined``.

        Source: https://github.com/state-spaces/mamba, ``mamba_ssm/ops/triton/ssd_combined.py``: x is (batch, seqlen,
        heads, headdim), dt (batch, seqlen, heads), A (heads), B and C (batch, seqlen, groups, dstate), D and dt_bias
        (heads), seq_idx (batch, seqlen); head h uses group h // (heads / groups). dt is biased, goes through softplus
        and is clamped, in FP32.
        """
        y = kernel(
            x.flatten(2, 3),
            dt.flatten(2),
            -self.A_log.exp(),
            b,
            c,
            chunk_size=self.cfg.chunk_size,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=(self.cfg.dt_min, self.cfg.dt_max),
            seq_idx=sequence_index(documents),
        )
        return y.reshape(x.shape)

    def _inputs(self, x: Tensor, *, b: Tensor, c: Tensor, dt: Tensor) -> ScanInputs:
        heads = x.shape[2:4]
        step = F.softplus(dt + self.dt_bias.view(heads)).clamp(self.cfg.dt_min, self.cfg.dt_max)
        return ScanInputs(x=scale_heads(x, step), log_decay=-step * self.A_log.exp().view(heads), b=b, c=c)


class Mamba2(nn.Module):
    """Mamba-2: projection, causal convolution, selective scan, gated norm, projection.

    ``in_proj`` and ``conv1d`` are stored group-major: for each group, the rows z, x, B, C, dt of its heads (x, B, C for
    the convolution). A plain row shard is then a correct tensor-parallel shard.

    Source: https://arxiv.org/abs/2405.21060, section 7.
    """

    def __init__(self, cfg: MambaConfig, *, d_model: int, norm_eps: float) -> None:
        super().__init__()
        self.cfg = cfg
        heads_per_group = cfg.num_heads // cfg.num_groups
        inner = heads_per_group * cfg.d_head
        self.group_split = (inner, inner + 2 * cfg.d_state, heads_per_group)  # z | x, B, C | dt
        self.conv_split = (inner, cfg.d_state, cfg.d_state)
        rows = sum(self.group_split)
        self.in_proj = Linear(d_model, cfg.num_groups * rows, bias=cfg.proj_bias, group_rows=rows)
        self.conv1d = CausalConv1d(cfg.num_groups * self.group_split[1], d_conv=cfg.d_conv, bias=cfg.conv_bias)
        self.conv1d.kernels = cfg.kernels
        self.scan = Scan(cfg)
        norm_width = inner if cfg.norm_group is NormGroup.group else cfg.d_inner
        self.norm = GatedRMSNorm(cfg.d_inner, group_width=norm_width, eps=norm_eps)
        self.out_proj = Linear(cfg.d_inner, d_model, bias=cfg.proj_bias)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        projected = self.in_proj(h).unflatten(-1, (-1, sum(self.group_split)))  # [B, S, G, rows]
        gate, conv_input, dt = projected.split(self.group_split, dim=-1)
        preceding = documents.halo(conv_input, count=self.cfg.d_conv - 1)
        mixed = self.conv1d(conv_input, documents, preceding=preceding)  # [B, S, G, x | B | C]
        x, b, c = mixed.split(self.conv_split, dim=-1)
        y = self.scan(x.unflatten(-1, (-1, self.cfg.d_head)), b=b, c=c, dt=dt, documents=documents)
        return self.out_proj(self.norm(y.flatten(3), gate).flatten(2))
