"""A tensor in 64 numbers, by random signs: the length of a sum of sketches estimates that of the sum of the tensors."""

import functools

import torch
from torch import Tensor

SIZE = 64
_COLUMNS = 4096


def sketch(tensor: Tensor) -> Tensor:
    """64 sums of elements with random signs, the same for all tensors of this size; small tensors are kept as they are.

    The mean of the squared length is that of the tensor; it varies by 18 %, and by up to 35 % for those of
    regular values, such as rank one.
    """
    flat = tensor.reshape(-1)
    if len(flat) <= SIZE:
        return torch.nn.functional.pad(flat, (0, SIZE - len(flat)))
    # Every element of a block has a sign of its own: with one per row, changes of low rank would add up or cancel.
    signs = _signs(flat.device, flat.dtype)
    count, rest = divmod(len(flat), len(signs))
    tail = torch.nn.functional.pad(flat[len(flat) - rest :] * signs[:rest], (0, -rest % SIZE))
    found = tail.view(-1, SIZE).sum(0)
    if not count:
        return found
    blocks = flat[: len(flat) - rest].view(count, SIZE, _COLUMNS).transpose(0, 1)
    sums = torch.bmm(blocks, signs.view(SIZE, _COLUMNS, 1))[..., 0]  # (64, count, columns) @ (64, columns, 1)
    more = _signs(flat.device, flat.dtype, seed=1).repeat(-(-sums.numel() // len(signs)))[: sums.numel()]
    return found + (sums * more.view_as(sums)).sum(1)


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (SIZE * _COLUMNS,), generator=generator).mul_(2).sub_(1).to(device, dtype)
