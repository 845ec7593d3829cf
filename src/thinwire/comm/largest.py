"""The largest values of a vector, fast on a CPU too."""

import math

import torch
from torch import Tensor

# Below this a plain top-k is fast enough.
_SMALL = 1 << 15


def largest(values: Tensor, count: int, scratch: Tensor | None = None) -> Tensor:
    """Indices of the `count` values with the largest magnitude; `scratch` is memory for as many values.

    On a CPU a top-k over millions costs more than a step may take. A sample gives a threshold that a few more than
    `count` values pass; the largest of these are the largest of all.
    """
    if count == len(values):
        return torch.arange(count, device=values.device)
    if values.device.type != "cpu" or len(values) < _SMALL:
        return values.abs().topk(count, sorted=False).indices
    sizes = torch.abs(values, out=None if scratch is None else scratch[: len(values)])
    stride = max(1, min(len(values) // 8192, count // 8))
    sample = sizes[::stride]
    wanted = min(len(sample), math.ceil(1.25 * count / stride) + 8)
    passing = _at_least(sizes, sample.topk(wanted, sorted=True).values[-1])
    if len(passing) < count:
        return sizes.topk(count, sorted=False).indices
    return passing[sizes[passing].topk(count, sorted=False).indices]


def _at_least(sizes: Tensor, threshold: Tensor) -> Tensor:
    """Indices of values that reach a threshold, where few do: first the columns that have any, then the values."""
    height = 16
    rest = len(sizes) % height
    grid = sizes[: len(sizes) - rest].view(height, -1)
    columns = torch.nonzero(grid.amax(0) >= threshold).flatten()
    row, column = torch.nonzero(grid[:, columns] >= threshold, as_tuple=True)
    last = torch.nonzero(sizes[len(sizes) - rest :] >= threshold).flatten() + len(sizes) - rest
    return torch.cat([row * grid.shape[1] + columns[column], last])
