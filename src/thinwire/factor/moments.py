"""Carry optimizer state through changes of shape.

With `W ≈ A B` the gradients are g_A = g_W Bᵀ and g_B = Aᵀ g_W, so first moments transform linearly
and second moments with elementwise squares of the same matrices (an approximation):

    from full   m_A = m_W Bᵀ          v_A = v_W (Bᵀ)²         m_B = Aᵀ m_W          v_B = (Aᵀ)² v_W
    to full     m_W = m_A (B⁺)ᵀ  or  (A⁺)ᵀ m_B

    re-cut      m_A' = m_A Dᵀ         v_A' = v_A (Dᵀ)²        m_B' = Cᵀ m_B         v_B' = (Cᵀ)² v_B
                with B' = D B, A' = A C

With W = U S Vᵀ, U and V fixed, g_S = Uᵀ g_W V:

    from full   m_S = Uᵀ m_W V        v_S = (Uᵀ)² v_W V²
    re-cut      m_S' = Pᵀ m_S Q       v_S' = (Pᵀ)² v_S Q²     with P = Uᵀ U', Q = Vᵀ V'

All matrices here are tall views, so transposed layers need no special case. Products and inverses are computed in
fp32 or wider, whatever the dtypes of weights and state.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.factor.matrix import MatrixView, wide

LINEAR = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
QUADRATIC = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
_COUNTS = frozenset({"step", "eta", "mu", "mu_product"})
"""Scalars that follow from the number of steps; others, such as LAMB's trust ratio, from the gradients."""

State = dict[str, Any]
Map = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def factors_from_full(state: State, view: MatrixView, a: Tensor, b: Tensor) -> tuple[State, State]:
    """State of A and of B from that of W."""

    def onto_a(moment: Tensor, power: Callable[[Tensor], Tensor]) -> Tensor:
        return view.to_matrix(moment) @ power(b).t()  # (m, n) @ (n, k)

    def onto_b(moment: Tensor, power: Callable[[Tensor], Tensor]) -> Tensor:
        return power(a).t() @ view.to_matrix(moment)  # (k, m) @ (m, n)

    return transport(state, onto_a), transport(state, onto_b)


def full_from_factor(state: State, view: MatrixView, *, a: Tensor | None = None, b: Tensor | None = None) -> State:
    """State of W from that of the factor that was trained: give `b` for A's state, `a` for B's."""
    if b is not None:
        inverse = torch.linalg.pinv(wide(b))  # (n, k)
        return transport(state, lambda moment, power: view.to_weight(moment @ power(inverse).t()))
    assert a is not None
    inverse = torch.linalg.pinv(wide(a))  # (k, m)
    return transport(state, lambda moment, power: view.to_weight(power(inverse).t() @ moment))


def recut_factors(states: Sequence[State], old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[State, State]:
    """States of A' and B' from those of A and B, when the singular values of A B were cut and A B became A' B'.

    With A' = U√Σ and B' = √ΣVᵀ there is B' = D B, D = Σ⁻¹A'ᵀA, and A' = A C, C = B B'ᵀΣ⁻¹: no inverse is needed.
    """
    (a, b), (new_a, new_b) = ([wide(t) for t in pair] for pair in (old, new))
    sigma = new_a.square().sum(0)  # (k',)
    inverse = torch.where(sigma > 0, 1 / sigma, 0.0)  # weights of zeros have no direction to follow
    d = (new_a.t() @ a) * inverse[:, None]  # (k', m) @ (m, k)
    c = (b @ new_b.t()) * inverse  # (k, n) @ (n, k')
    state_a = transport(states[0], lambda moment, power: moment @ power(d).t())
    return state_a, transport(states[1], lambda moment, power: power(c).t() @ moment)


def middle_from_full(state: State, view: MatrixView, u: Tensor, vt: Tensor) -> State:
    """State of S from that of W, when W became U S Vᵀ."""
    return transport(state, lambda moment, power: power(u).t() @ view.to_matrix(moment) @ power(vt).t())


def recut_middle(state: State, old: Sequence[Tensor], new: Sequence[Tensor]) -> State:
    """State of S' from that of S, when U S Vᵀ became U' S' V'ᵀ."""
    left = wide(old[0]).t() @ wide(new[0])  # (k, m) @ (m, k')
    right = wide(old[-1]) @ wide(new[-1]).t()  # (k, n) @ (n, k')
    return transport(state, lambda moment, power: power(left).t() @ moment @ power(right))


def transport(state: State, onto: Map) -> State:
    """Carry each moment by `onto(moment, power)`; counters stay, unknown state is dropped with a warning."""
    carried: State = {}
    for name, value in state.items():
        if name in LINEAR and isinstance(value, Tensor):
            carried[name] = _carry(value, onto, lambda x: x)
        elif name in QUADRATIC and isinstance(value, Tensor):
            carried[name] = _carry(value, onto, torch.square)
        elif isinstance(value, Tensor) and value.dim() == 0:
            carried[name] = value.clone()
        elif value is None or isinstance(value, bool | int | float | str):
            carried[name] = value
        else:
            return _forget(name)
    if "square_avg" in carried and "grad_avg" in carried:
        # Centered RMSprop takes the root of the variance, which rounding must not make negative.
        variance = (state["square_avg"] - state["grad_avg"].square()).clamp_min(0)
        carried["square_avg"] = _carry(variance, onto, torch.square) + carried["grad_avg"].square()
    return carried


def _carry(moment: Tensor, onto: Map, power: Callable[[Tensor], Tensor]) -> Tensor:
    """Map one moment in fp32 or wider; returns its original dtype."""
    exact = wide(moment)
    return onto(exact, lambda x: power(x.to(exact.dtype))).to(moment.dtype).contiguous()


def _forget(name: str) -> State:
    warnings.warn(
        f"optimizer state {name!r} is not known to follow a change of shape: it is reset at each", stacklevel=2
    )
    return {}


def moments_of(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors in one parameter's state that have a mean, in a fixed order: all but counts of steps."""
    known = LINEAR | QUADRATIC
    return sorted(n for n, value in state.items() if isinstance(value, Tensor) and (n in known or _has_mean(n, value)))


def _has_mean(name: str, value: Tensor) -> bool:
    return value.dim() > 0 or (value.is_floating_point() and name not in _COUNTS)
