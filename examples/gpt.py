"""A small GPT, and a corpus that every Python has: shared by the examples, the demo and the benchmarks.

The model is an ordinary decoder-only transformer (pre-norm, GELU, tied embeddings, dropout) over bytes. The corpus is
the source text of Python's standard library, so nothing has to be downloaded.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a model.

    Args:
        layers: number of transformer blocks.
        width: width of the residual stream, a multiple of `heads`.
        heads: number of attention heads.
        context: longest input in tokens.
        vocabulary: rows of the embedding; bytes need 256, more only add parameters.
        dropout: probability, at the embedding and on every residual branch.
    """

    layers: int
    width: int
    heads: int
    context: int = 128
    vocabulary: int = BYTES
    dropout: float = 0.1


#: Sizes by name. The two large ones pad the vocabulary of bytes to reach their number of parameters.
SIZES = {
    "tiny": GPTConfig(layers=2, width=64, heads=2, context=64),
    "demo": GPTConfig(layers=4, width=256, heads=4, context=64),
    "30M": GPTConfig(layers=8, width=512, heads=8, vocabulary=9_216),
    "100M": GPTConfig(layers=12, width=768, heads=12, vocabulary=19_456),
}


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalized before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        return x


class GPT(nn.Module):
    """Predicts the next byte. Input and output embedding share one tensor."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialize)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, length, vocabulary), from int64 tokens of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats: a scalar."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @property
    def numel(self) -> int:
        """Number of parameters; the shared embedding counts once."""
        return sum(param.numel() for param in self.parameters())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _source_files() -> Iterator[Path]:
    return iter(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


class Corpus(Dataset[tuple[Tensor, Tensor]]):
    """The standard library's modules in order of their names, split into windows of `context` bytes.

    An item is a window, and the same window one byte further on: int64 of shape (context,).
    """

    def __init__(self, context: int) -> None:
        self.context = context
        text = bytearray(b"".join(file.read_bytes() for file in _source_files()))
        self.text = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """A batch of `count` windows, int64 of shape (count, context), drawn with torch's default generator."""
        windows = [self[int(index)] for index in torch.randint(len(self), (count,))]
        return torch.stack([tokens for tokens, _ in windows]), torch.stack([targets for _, targets in windows])
