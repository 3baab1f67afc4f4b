"""Grouped-query attention within documents."""

import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.config.model import AttentionConfig, Position
from nvfp4_train.model.documents import Documents
from nvfp4_train.model.linear import Linear
from nvfp4_train.model.rope import rotate


class Attention(nn.Module):
    """Causal grouped-query attention that never looks into another document.

    ``qkv_proj`` is stored group-major: for each key-value head, the rows of its query heads, of its key and of its
    value. A plain row shard is then a correct tensor-parallel shard.
    """

    def __init__(self, cfg: AttentionConfig, *, d_model: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.queries_per_group = cfg.num_heads // cfg.num_kv_heads
        self.qkv_proj = Linear(d_model, (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.d_head)
        self.o_proj = Linear(cfg.num_heads * cfg.d_head, d_model)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        """Map [B, S, D] to [B, S, D]."""
        qkv = self.qkv_proj(h).unflatten(-1, (-1, self.queries_per_group + 2, self.cfg.d_head))  # [B, S, G, heads, P]
        query, key, value = qkv.split((self.queries_per_group, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))  # [B, S, H, P]
        if self.cfg.position is Position.rope:
            query = rotate(query, documents.positions, theta=self.cfg.rope_theta)
            key = rotate(key, documents.positions, theta=self.cfg.rope_theta)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if documents.one_per_row else documents.causal_mask()[:, None],
            is_causal=documents.one_per_row,
            enable_gqa=self.queries_per_group > 1,
        )  # [B, H, S, P]
        return self.o_proj(attended.transpose(1, 2).flatten(2))
