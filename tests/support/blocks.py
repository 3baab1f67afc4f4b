"""A small model with the module names of a real one: Linears in residual blocks, and a head."""

import torch
from torch import Tensor, nn


class TinyBlocks(nn.Module):
    """`num_blocks` residual MLPs `blocks.<i>.up_proj`, `down_proj` and an `lm_head`; every width divides by 16."""

    def __init__(self, *, num_blocks: int = 3, d_model: int = 32, d_ff: int = 64, num_outputs: int = 48) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.embedding = nn.Embedding(num_outputs, d_model)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up_proj": nn.Linear(d_model, d_ff, bias=False),
                    "down_proj": nn.Linear(d_ff, d_model, bias=False),
                }
            )
            for _ in range(num_blocks)
        )
        self.lm_head = nn.Linear(d_model, num_outputs, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                if not parameter.is_meta:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [B, S] int64 to [B, S, num_outputs]."""
        h = self.embedding(tokens).to(self.compute_dtype)
        for block in self.blocks:
            h = h + block["down_proj"](block["up_proj"](h).relu())
        return self.lm_head(h)
