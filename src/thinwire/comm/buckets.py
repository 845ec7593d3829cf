"""What tensors look like while they travel: flat buckets, and the number format of the wire."""

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

WIRES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One flat copy of tensors of the same dtype."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def reals(t: Tensor) -> Tensor:
    """The same values in the same memory as real numbers, two for each complex one."""
    return torch.view_as_real(t.detach()) if t.is_complex() else t


def pack_wide(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """One flat copy of tensors of any floating dtypes, in fp32 at least; in `out` if it is given."""
    parts = [reals(t).detach().reshape(-1) for t in tensors]
    dtype = reduce(torch.promote_types, {part.dtype for part in parts}, torch.float32)
    return torch.cat([part.to(dtype) for part in parts], out=out)


def unpack_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write a flat bucket back into its tensors."""
    with torch.no_grad():
        targets = list(tensors) if flat.is_complex() else [reals(t) for t in tensors]
        pieces = flat.split([t.numel() for t in targets])
        torch._foreach_copy_(targets, [piece.view_as(t) for piece, t in zip(pieces, targets, strict=True)])


def rounded(flat: Tensor, wire: str) -> Tensor:
    """A bucket in the wire's number format; complex numbers as two reals each."""
    reals = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return reals.to(WIRES[wire])


def unrounded(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """What `rounded` gave, as complex numbers again if it was; reals are converted where they are unpacked."""
    if not dtype.is_complex or flat.is_complex():
        return flat
    return torch.view_as_complex(flat.to(dtype.to_real()).view(-1, 2))


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that fit one bucket, in an order every worker shares."""
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        buckets.setdefault(t.dtype, []).append(t)
    return list(buckets.values())


def size_of(tensor: Tensor) -> int:
    """Bytes a tensor holds."""
    return tensor.numel() * tensor.element_size()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every value is a number; tensors without values, as in a simulation, have none that is not."""
    return all(t.is_meta or not t.numel() or _is_finite(t) for t in tensors)


def _is_finite(t: Tensor) -> bool:
    if t.is_complex():
        return bool(torch.isfinite(t).all())
    # Both ends are NaN if anything is, and this is ten times as fast on a CPU as looking at each value.
    return bool(torch.isfinite(torch.stack(torch.aminmax(t.detach()))).all())


_CHUNK = 1 << 22


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that changes when any bit or any place of the values does."""
    total = 0
    for t in tensors:
        total = _mix(total, t.numel())
        bits = _as_integers(t.detach())
        for start in range(0, bits.numel(), _CHUNK):
            part = bits[start : start + _CHUNK].to(torch.int64)
            # Odd weights: no change of a single value can vanish modulo 2⁶⁴.
            weights = torch.arange(start, start + part.numel(), device=part.device).mul_(2).add_(0x9E3779B1)
            total = _mix(total, int((part * weights).sum()))
    return total


def _as_integers(t: Tensor) -> Tensor:
    flat = t.contiguous().reshape(-1)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), torch.int8)
    return flat.to(torch.int8) if flat.dtype == torch.bool else flat.view(integer)


def _mix(total: int, value: int) -> int:
    return (total * 6364136223846793005 + value) % (1 << 62)
