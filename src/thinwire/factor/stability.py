"""Singular values of a model's weights, and how far the bases of these move (dissertation, Eq. 4.6 and 4.7).

A tall weight W (m, n) of rank r is P H with P = U Vᵀ from its compact SVD, the orthogonal factor of its polar
decomposition, and Q R with R (n, n) upper triangular. P is the basis, R mixes.

    stability    S = tr(Pᵢ Pⱼᵀ) / min(rᵢ, rⱼ)      1 for the same basis, 0 for independent ones, −1 for opposite ones
    printed      tr(Pᵢ Pⱼᵀ) / m                    Eq. 4.6 to the letter: n/m, not 1, for the same basis
    similarity   D = 1 − √ mean (Rᵢ − Rⱼ)²         1 for the same R, unbounded below

S is invariant to scaling either matrix by a positive number, to multiplying both from the left or right by the same
orthogonal matrix, and to transposing both. D is invariant to multiplying either matrix by an orthogonal one from the
left, but not to scaling. Eq. 4.7 divides by m n; here the mean is over R's n × n elements, and R's diagonal is made
positive, since R is not unique otherwise. If leading columns of W are linearly dependent, R is not unique even then.
"""

import fnmatch
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.base.checks import check_whole, patterns
from thinwire.base.errors import ConfigError
from thinwire.base.files import memory
from thinwire.factor.convert import warn_unmatched_patterns
from thinwire.factor.forms import Chain, Layers, Source, bare, label_of, read, shape_of

Measures = dict[str, float]


POINTS = 33
"""Singular values kept of each layer, evenly spaced from the largest to the smallest."""
_DIGITS = 4


class Basis(NamedTuple):
    """The parts of a matrix (m, n) that are compared."""

    polar: Tensor
    """U Vᵀ (m, n), over the nonzero singular values."""
    mixing: Tensor
    """R (n, n) with a positive diagonal."""
    rank: int

    def kept(self) -> "Basis":
        """In fp32 on the CPU."""
        return Basis(self.polar.float().cpu(), self.mixing.float().cpu(), self.rank)


def basis_of(chain: Chain) -> Basis:
    """The basis of a tall product of matrices, computed in fp64.

    Only the QR of the first one is as tall as the matrix. Singular values up to eps·max(m, n)·σ₁ count as
    zero, with the eps of fp32 unless the matrix is fp64; so rank-k factors have rank k at most.
    """
    m, n = shape_of(chain)
    q, core = _reduced(chain)
    if core is None:
        return Basis(q.new_full((m, n), torch.nan), q.new_full((n, n), torch.nan), n)
    # On a GPU an SVD of this size takes several times as long.
    u, sigma, vt = (t.to(core.device) for t in torch.linalg.svd(core.cpu(), full_matrices=False))
    eps = torch.finfo(torch.float64 if chain[0].dtype == torch.float64 else torch.float32).eps
    rank = int((sigma > eps * max(m, n) * sigma[0]).sum())
    polar = q @ (u[:, :rank] @ vt[:rank])  # (m, k) @ (k, n)
    return Basis(polar, _mixing(core), rank)


def _reduced(chain: Chain, mode: str = "reduced") -> tuple[Tensor, Tensor | None]:
    """Q (m, k) and C (k, n) in fp64 whose product is that of a chain, without Q in mode "r"; no C if not finite."""
    first, *rest = (factor.detach().double() for factor in chain)
    if not all(torch.isfinite(factor).all() for factor in (first, *rest)):
        return first, None
    q, core = torch.linalg.qr(first, mode=mode)
    for factor in rest:
        core = core @ factor  # (k, n)
    return q, core


def _mixing(core: Tensor) -> Tensor:
    r = torch.linalg.qr(core, mode="r").R  # (min(k, n), n)
    mixing = r.new_zeros(r.shape[1], r.shape[1])
    mixing[: len(r)] = r * torch.where(r.diagonal() < 0, -1.0, 1.0)[:, None]
    return mixing


def measure(before: Basis, after: Basis) -> Measures:
    """Both measures of two matrices of one shape, stability by ranks and as printed."""
    trace = (before.polar.double() * after.polar.double()).sum()
    rank = min(before.rank, after.rank)
    # A zero matrix has no basis: it is similar only to another zero matrix.
    by_rank = (trace / rank).clamp(-1, 1).item() if rank else float(before.rank == after.rank)
    apart = (before.mixing.double() - after.mixing.double()).square().mean().sqrt()
    printed = trace.item() / len(before.polar)
    return {"stability": by_rank, "stability_printed": printed, "similarity": 1 - apart.item()}


def compare(before: Source, after: Source) -> dict[str, Measures]:
    """Both measures for every layer of two models, state dicts or paths, in the model's order, layers by name.

    A path is a safetensors file or the folder of a run, a finished model, a checkpoint or a save; of one written
    while groups trained separately, the first group's model is used. Any layer may be full in one and factored in the
    other. Embeddings are left out if one of the two is a model: in files they look like layers.
    """
    one, other = read(before), read(after)
    _join(one, other.chains())
    _join(other, one.chains())
    left_out = one.left_out | other.left_out
    ours, theirs = ({k: c for k, c in side.chains().items() if k not in left_out} for side in (one, other))
    _check_alike(ours, theirs)
    order = theirs if other.ordered and not one.ordered else ours
    return {label_of(key): measure(basis_of(ours[key]), basis_of(theirs[key])) for key in order}


def _join(layers: Layers, others: dict[str, Chain]) -> None:
    """Treat a Sequential of two weights as one layer if the other model has a layer of its name."""
    own = layers.chains()
    for key in others:
        name = key.removesuffix("weight").removesuffix(".")
        if key not in own and key.endswith("weight") and layers.has_pair(name):
            layers.sequentials.add(name)


def _check_alike(ours: dict[str, Chain], theirs: dict[str, Chain]) -> None:
    if not (ours or theirs):
        raise ConfigError("there is no weight of two dimensions or more to compare; give models or their state dicts")
    for key, chain in (*ours.items(), *theirs.items()):
        if 8 * math.prod(shape_of(chain)) > memory() // 4:  # thin factors may have a product of any size
            raise ConfigError(f"`{label_of(key)}` is {shape_of(chain)}, too large to be compared on this machine")
    wrong = [f"`{label_of(key)}` is only in the first" for key in ours if key not in theirs]
    wrong += [f"`{label_of(key)}` is only in the second" for key in theirs if key not in ours]
    for key in (key for key in ours if key in theirs):
        shapes = shape_of(ours[key]), shape_of(theirs[key])
        if shapes[0] != shapes[1]:
            wrong.append(f"`{label_of(key)}` is {shapes[0]} in the first and {shapes[1]} in the second")
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        listed = ", ".join(wrong[:6]) + more
        raise ConfigError(f"the two have different architectures: {listed}; compare two states of one model")


@torch.no_grad()
def spectra(model: nn.Module) -> dict[str, list[float]]:
    """Of each weight of two dimensions or more its singular values as shares of the largest, by the layer's name.

    A factored layer's values behind its rank are 0. A layer with values that are not finite is left out, and so are
    embeddings. Nothing is sent, and training is not affected.
    """
    found = {label_of(key): _shares(chain) for key, chain in read(model).chains().items()}
    return {label: shares for label, shares in found.items() if shares}


def _shares(chain: Chain) -> list[float]:
    _, core = _reduced(chain, "r")
    if core is None:
        return []
    sigma = torch.linalg.svdvals(core.cpu())
    values = torch.zeros(shape_of(chain)[1], dtype=sigma.dtype)
    values[: len(sigma)] = sigma / sigma[0].clamp(min=torch.finfo(sigma.dtype).tiny)
    places = torch.linspace(0, len(values) - 1, min(POINTS, len(values))).round().long()
    return [float(f"{value:.{_DIGITS}g}") for value in values[places].tolist()]


class Stability:
    """Measures during training how far each layer's basis and mixing matrix moved since an earlier step.

        watch = Stability(model, every=100, back=5)     # before training: the first snapshot is at step 0
        ...
        optimizer.step()
        if record := watch.update(step):                  # None unless there is something to compare with
            ...

    Works for any method: give the replica, a DDP or the bare model. Weights of two or more dimensions are measured
    in the order of registration, full or factored, across changes of rank; embeddings and what `keep` matches are not.
    While groups train separately, this measures this worker's model. Nothing is sent, and training is not affected.

    It keeps at most `back` snapshots in CPU memory, each with m·n + n² fp32 numbers for an (m, n) weight: one to two
    times the size of the model. Snapshots are not saved: after a resume, measurements start over.
    """

    def __init__(
        self, model: nn.Module, every: int = 100, back: int = 1, keep: Sequence[str] = (), *, step: int = 0
    ) -> None:
        self.model = model
        self.every, self.back, self.keep = every, back, patterns(keep)
        for name in ("every", "back"):
            check_whole(self, name, 1)
        warn_unmatched_patterns(bare(model), self.keep)
        self.snapshots: deque[tuple[int, dict[str, Basis]]] = deque(maxlen=back)
        self.update(step)

    def update(self, step: int) -> dict[str, Any] | None:
        """Call after optimizer step `step`: every `every` steps, compares with `back` snapshots before, if any."""
        if step % self.every or (self.snapshots and self.snapshots[-1][0] == step):
            return None
        now = self._bases()
        record = None
        if len(self.snapshots) == self.back:
            earlier, then = self.snapshots[0]
            both = [label for label in now if label in then and now[label].polar.shape == then[label].polar.shape]
            layers = {label: measure(then[label], now[label]) for label in both}
            record = {"step": step, "before": earlier, "layers": layers}
        self.snapshots.append((step, now))
        return record

    def _bases(self) -> dict[str, Basis]:
        chains = read(self.model).chains()
        return {label_of(key): basis_of(chain).kept() for key, chain in chains.items() if not self._is_kept(key)}

    def _is_kept(self, key: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for name in (key, label_of(key)) for pattern in self.keep)
