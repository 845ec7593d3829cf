"""Models of words: recurrent layers, attention, tables, Hugging Face's own."""

import functools
from typing import Any

import torch
import torch.fx
from torch import Generator, Tensor, nn
from torch.nn import functional

from zoo import AB, WIDE, Model, mlp, shape, words


class Recurrent(nn.Module):
    """An embedding, a recurrent layer and a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.inner = kind(WIDE, WIDE, batch_first=True, **options)
        width = WIDE * (2 if options.get("bidirectional") else 1)
        self.middle = nn.Linear(width, WIDE)
        self.extra = nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.inner(self.table(tokens))
        return self.head(torch.relu(self.extra(torch.relu(self.middle(hidden)))))


shape("lstm", batch=words)(lambda: Recurrent(nn.LSTM, num_layers=2))
shape("gru both ways", batch=words)(lambda: Recurrent(nn.GRU, bidirectional=True))


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.one, self.two = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)
        self.head = nn.Linear(WIDE, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.two(torch.relu(self.one(self.table(tokens)))))


shape("tied head", batch=words)(Tied)


class Block(nn.Module):
    """A block of GPT-2: causal attention and two Linears, each on top of what was there."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)  # (b, heads, 3, l, d)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class TiedGPT(nn.Module):
    """A GPT of 992 parameters whose head is its embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(40, width), nn.Embedding(7, width)
        self.block, self.norm = Block(width, 2), nn.LayerNorm(width)
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.block(x)))


shape("tied gpt", batch=words)(TiedGPT)


class Attention(nn.Module):
    """Attention as torch has it, packed and with widths of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.own = nn.MultiheadAttention(WIDE, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDE, 2, kdim=16, vdim=16, batch_first=True)
        self.narrow, self.head = nn.Linear(WIDE, 16), nn.Linear(WIDE, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.own(x, x, x, need_weights=False)[0]
        other = self.narrow(x)
        return self.head(x + self.cross(x, other, other)[0])


shape("attention", batch=words)(Attention)


class Encoder(nn.Module):
    """torch's own encoder with a class token and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, WIDE)), nn.Parameter(torch.randn(8, WIDE))
        layer = nn.TransformerEncoderLayer(WIDE, 2, 2 * WIDE, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDE, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(tokens), -1, -1), self.table(tokens)], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


shape("transformer encoder", batch=words)(Encoder)


SPARSE = dict.fromkeys((*AB, "allreduce int8", "powersgd", "topk", "onebit"), "has a sparse gradient")


@shape("sparse embedding", batch=words, optimizer=functools.partial(torch.optim.SGD, lr=0.01), refused=SPARSE)
def sparse() -> nn.Module:
    """Gradients of a few rows."""
    return nn.Sequential(nn.Embedding(40, WIDE, sparse=True), mlp())


class Bags(nn.Module):
    """Sums of embeddings, as recommenders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, WIDE, mode="sum", padding_idx=0)
        self.net, self.pairs = mlp(), nn.Bilinear(WIDE, WIDE, WIDE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bag(tokens)
        return self.net(self.pairs(x, x.flip(0)))


shape("embedding bags and a bilinear", batch=words)(Bags)


def bert() -> nn.Module:
    """A tiny BERT."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=40, hidden_size=WIDE, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * WIDE,
            max_position_embeddings=16,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """A tiny T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=40, d_model=WIDE, d_kv=12, d_ff=2 * WIDE, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )  # fmt: skip


def llama() -> nn.Module:
    """A tiny Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=WIDE, intermediate_size=2 * WIDE, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip


def labelled(rng: Generator) -> dict[str, Tensor]:
    """Tokens that are their own labels."""
    tokens = words(rng)
    return {"input_ids": tokens, "labels": tokens}


def own_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """The loss that the model itself computes."""
    return model(**batch).loss


for _name, _build in (("bert", bert), ("t5", t5), ("llama", llama)):
    shape(_name, batch=labelled, loss=own_loss)(_build)
