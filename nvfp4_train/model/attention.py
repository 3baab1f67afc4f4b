"""Grouped-query attention within documents."""

from torch import Tensor, nn

from nvfp4_train.config.model import AttentionConfig, Position
from nvfp4_train.model.attend import attend
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.linear import Linear
from nvfp4_train.model.norm import RMSNorm
from nvfp4_train.model.rope import rotate


class Attention(nn.Module):
    """Causal grouped-query attention that never looks into another document.

    ``qkv_proj`` is stored group-major: for each key-value head, the rows of its query heads, of its key and of its
    value. A plain row shard is then a correct tensor-parallel shard.
    """

    def __init__(self, cfg: AttentionConfig, *, d_model: int, norm_eps: float) -> None:
        super().__init__()
        self.cfg = cfg
        self.queries_per_group = cfg.num_heads // cfg.num_kv_heads
        self.qkv_proj = Linear(d_model, (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.d_head, bias=cfg.qkv_bias)
        self.q_norm = RMSNorm(cfg.d_head, eps=norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.d_head, eps=norm_eps) if cfg.qk_norm else None
        self.o_proj = Linear(cfg.num_heads * cfg.d_head, d_model, bias=cfg.output_bias)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        qkv = self.qkv_proj(h).unflatten(-1, (-1, self.queries_per_group + 2, self.cfg.d_head))  # [B, S, G, heads, P]
        query, key, value = (part.flatten(2, 3) for part in qkv.split((self.queries_per_group, 1, 1), dim=3))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.cfg.position is Position.rope:
            query = rotate(query, documents.positions, theta=self.cfg.rope_theta)
            key = rotate(key, documents.positions, theta=self.cfg.rope_theta)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # [B, H, S, P]
        window = self.cfg.window_tokens
        key, value = documents.with_seen(key, value, window_tokens=window)
        attended = attend(query, key, value, documents=documents, window_tokens=window)
        return self.o_proj(attended.transpose(1, 2).flatten(2))
