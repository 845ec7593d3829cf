"""Autoformer (Wu et al., NeurIPS 2021): forecasts by decomposition and auto-correlation instead of attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.base.errors import ConfigError


class Autoformer(nn.Module):
    """Autoformer as its authors published it.

    Takes (batch, inputs + horizon, variables + marks): the values of the first `inputs` rows, anything in place of
    the future ones, and the time marks of all rows. Returns the future values, (batch, horizon, variables).
    """

    def __init__(
        self,
        *,
        inputs: int = 96,
        label: int = 48,
        horizon: int = 96,
        variables: int = 7,
        marks: int = 5,
        width: int = 512,
        heads: int = 8,
        encoder_layers: int = 2,
        decoder_layers: int = 1,
        hidden: int = 2048,
        window: int = 25,
        factor: int = 1,
        dropout: float = 0.05,
    ) -> None:
        super().__init__()
        _check(inputs=inputs, label=label, width=width, heads=heads, window=window)
        self.inputs, self.label, self.horizon, self.variables = inputs, label, horizon, variables
        self.decompose = Decomposition(window)
        self.encoder_embedding = _Embedding(variables, marks, width, dropout)
        self.decoder_embedding = _Embedding(variables, marks, width, dropout)
        sizes: dict[str, Any] = {"width": width, "hidden": hidden, "factor": factor}
        sizes |= {"window": window, "dropout": dropout}
        self.encoder = nn.ModuleList(_EncoderLayer(**sizes) for _ in range(encoder_layers))
        self.encoder_norm = _SeasonalNorm(width)
        self.decoder = nn.ModuleList(_DecoderLayer(variables, **sizes) for _ in range(decoder_layers))
        self.decoder_norm = _SeasonalNorm(width)
        self.head = nn.Linear(width, variables)

    def forward(self, x: Tensor) -> Tensor:
        values, marks = x[..., : self.variables], x[..., self.variables :]
        known, first = values[:, : self.inputs], self.inputs - self.label
        memory = self.encoder_embedding(known, marks[:, : self.inputs])
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        # The future starts without a season, at the mean of the known values.
        seasonal, trend = self.decompose(known)
        seasonal = F.pad(seasonal[:, first:], (0, 0, 0, self.horizon))  # (batch, label + horizon, variables)
        trend = torch.cat([trend[:, first:], known.mean(1, keepdim=True).expand(-1, self.horizon, -1)], 1)
        out = self.decoder_embedding(seasonal, marks[:, first:])
        for layer in self.decoder:
            out, more = layer(out, memory)
            trend = trend + more
        return (trend + self.head(self.decoder_norm(out)))[:, self.label :]


def _check(*, inputs: int, label: int, width: int, heads: int, window: int) -> None:
    if width % heads:
        raise ConfigError(f"`width={width}` must be a multiple of `heads={heads}`")
    if window % 2 == 0:
        raise ConfigError(f"`window={window}` must be odd: the moving average has a middle")
    if not 0 <= label <= inputs:
        raise ConfigError(f"`label={label}` must be from 0 to `inputs={inputs}`: the decoder begins inside the inputs")


class Decomposition(nn.Module):
    """The season and the trend of a series (batch, time, channels); the trend is its moving average.

    The first and the last value stand for those beyond the ends.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Not by replication padding: its gradient on CUDA is not deterministic.
        before, after = (end.expand(-1, self.window // 2, -1) for end in (x[:, :1], x[:, -1:]))
        padded = torch.cat([before, x, after], 1)
        trend = F.avg_pool1d(padded.transpose(1, 2), self.window, stride=1).transpose(1, 2)
        return x - trend, trend


class AutoCorrelation(nn.Module):
    """Mixes a series with itself, or another one, shifted by the delays at which the two are most similar.

    Of the correlation only its mean over heads and channels is used, and every head moves by the same delays. So heads
    do not show here, the mean may be taken before the transform back, and it has one series per example.
    """

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        length = x.shape[1]
        # In half precision only lengths that are powers of 2 can be transformed. `n` pads a shorter memory with zeros
        # and truncates a longer one.
        query, key, value = (
            torch.fft.rfft(part.float(), n=length, dim=1)  # (batch, frequencies, width)
            for part in (self.query(x), self.key(memory), self.value(memory))
        )
        alike = torch.fft.irfft((query * key.conj()).mean(2), n=length)  # (batch, delays)
        # A sum of shifted copies is a correlation too, with a series that is zero at all other delays.
        moves = torch.fft.rfft(self._weights(alike))  # (batch, frequencies)
        return self.out(torch.fft.irfft(value * moves.conj()[..., None], n=length, dim=1))

    def _weights(self, alike: Tensor) -> Tensor:
        """(batch, delays): the softmax of the best delays and zero elsewhere.

        In training the delays are the best ones of the whole batch, otherwise each example's own.
        """
        count = int(self.factor * math.log(alike.shape[1]))
        judged = alike.mean(0, keepdim=True) if self.training else alike
        delays = judged.argsort(1, descending=True)[:, :count].expand(alike.shape[0], -1)
        best = alike.gather(1, delays).softmax(1)
        return torch.zeros_like(alike).scatter(1, delays, best)


class _Embedding(nn.Module):
    """Each row's values with those of its neighbours, and its time marks; positions are not embedded."""

    def __init__(self, variables: int, marks: int, width: int, dropout: float) -> None:
        super().__init__()
        self.values = nn.Conv1d(variables, width, 3, padding=1, padding_mode="circular", bias=False)
        self.marks = nn.Linear(marks, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_normal_(self.values.weight, nonlinearity="leaky_relu")

    def forward(self, values: Tensor, marks: Tensor) -> Tensor:
        return self.dropout(self.values(values.transpose(1, 2)).transpose(1, 2) + self.marks(marks))


class _SeasonalNorm(nn.Module):
    """LayerNorm minus its mean over time, because a season has no level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x - x.mean(1, keepdim=True)


class _FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.widen = nn.Conv1d(width, hidden, 1, bias=False)
        self.narrow = nn.Conv1d(hidden, width, 1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.gelu(self.widen(x.transpose(1, 2))))
        return self.dropout(self.narrow(x)).transpose(1, 2)


class _EncoderLayer(nn.Module):
    """Passes on the season only; the trend is dropped after each half."""

    def __init__(self, *, width: int, hidden: int, window: int, factor: int, dropout: float) -> None:
        super().__init__()
        self.correlation = AutoCorrelation(width, factor)
        self.feed = _FeedForward(width, hidden, dropout)
        self.decompose = Decomposition(window)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.decompose(x + self.dropout(self.correlation(x, x)))
        x, _ = self.decompose(x + self.feed(x))
        return x


class _DecoderLayer(nn.Module):
    """Passes on the season, and returns the removed trends as values of the variables."""

    def __init__(self, variables: int, *, width: int, hidden: int, window: int, factor: int, dropout: float) -> None:
        super().__init__()
        self.own = AutoCorrelation(width, factor)
        self.cross = AutoCorrelation(width, factor)
        self.feed = _FeedForward(width, hidden, dropout)
        self.decompose = Decomposition(window)
        self.dropout = nn.Dropout(dropout)
        self.trend = nn.Conv1d(width, variables, 3, padding=1, padding_mode="circular", bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        x, first = self.decompose(x + self.dropout(self.own(x, x)))
        x, second = self.decompose(x + self.dropout(self.cross(x, memory)))
        x, third = self.decompose(x + self.feed(x))
        return x, self.trend((first + second + third).transpose(1, 2)).transpose(1, 2)
