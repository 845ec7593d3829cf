"""One or two log lines of a replica: what it trains and how, the result, and what is of one group only.

Messages go to the logger "thinwire". If a script has not set up logging, they go to the standard error of rank 0;
`logging.getLogger("thinwire").setLevel(logging.WARNING)` silences them.
"""

import logging
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from thinwire.base import units
from thinwire.config.common import Config
from thinwire.factor.convert import Kept
from thinwire.methods.runner import Runner

log = logging.getLogger("thinwire")
_NAMES = 3


def ensure_logging() -> None:
    """Log to standard error if the script has not set up logging."""
    if not log.hasHandlers() and log.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("thinwire: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def log_attached(method: Runner, trained: int) -> None:
    """Log workers and size, and for methods that factor how many weights they will factor."""
    if method.topology.rank:
        return
    workers, groups = method.topology.world_size, len(method.topology.groups)
    who = f"{units.count(workers, 'worker')} in {units.count(groups, 'group')}" if workers > 1 else "one worker"
    text = f"{type(method.config).__name__} on {who}: {trained:,} parameters to train"
    if method.shape.layers:
        text += f", {units.count(len(method.shape.layers), 'weight')} to factor{_full(method.shape.kept)}"
    log.info(text)
    if isinstance(method.config, Config):
        if method.config.chosen:
            log.info(method.config.chosen)
        if method.config.idle:
            log.warning(method.config.idle)


def log_past_end(method: Runner) -> bool:
    """Log that training goes on past `total_steps`, if it does; returns whether."""
    total = getattr(method.config, "total_steps", None)  # a config of one's own may have it too
    if total is None or method.step <= total:
        return False
    if not method.topology.rank:
        log.warning("step %d is beyond total_steps=%d: training stays in phase %r", method.step, total, method.phase)
    return True


def log_finished(method: Runner, sizes: tuple[int, int], ranks: Collection[int], usual_bytes: int) -> None:
    """Log size before and after, what was factored, and bytes sent compared with fp32 all-reduce."""
    if method.topology.rank:
        return
    name, (before, after) = type(method.config).__name__, sizes
    text = f"{name} finished after {units.count(method.step, 'step')}"
    if method.shape.layers:
        text += f": {before:,} parameters are now {after:,} ({before / max(1, after):.2f} : 1), "
        text += f"{units.count(len(ranks), 'weight')} factored{_ranks(ranks)}{_full(method.shape.kept)}"
    if usual_bytes:
        ledger = method.wire.ledger
        sent = ledger.slow_bytes - ledger.slow_bytes_for("evaluate")
        text += f"; {units.size(sent)} left this node, {sent / usual_bytes:.3g} of fp32 all-reduce's "
        text += units.size(usual_bytes)
    log.info(text)
    if method.shape.layers and not method.shape.decompositions:
        if method.shape.must_factor:
            log.warning("%s ended before it factored anything, so the model stays full; finish(cutoff=…) cuts it", name)
    elif method.step and method.missed:
        log.warning("%s %s: the run was too short for its settings", name, method.missed)
    elif method.shape.layers and after >= before:
        log.warning("%s did not make the model smaller; use a higher cutoff, here or in finish(cutoff=…)", name)


class OneGroupNotice:
    """Says once per run, on rank 0, that a state or an evaluation is of one group's model and not of all.

    It hooks into the model; a copy of the model has a hook that says nothing.
    """

    def __init__(self, replica: Any = None) -> None:
        self._replica = (lambda: None) if replica is None else weakref.ref(replica)

    def __reduce__(self) -> tuple[Any, ...]:
        return OneGroupNotice, ()

    def watch(self, model: nn.Module) -> list[Callable[[], None]]:
        """Follow the model's states and evaluations; returns what ends this."""
        handles = (
            model.register_state_dict_pre_hook(self._before_state),
            model.register_forward_pre_hook(self.evaluates),
        )
        return [handle.remove for handle in handles]

    def evaluates(self, model: nn.Module, inputs: Any = None) -> None:
        """The model is called; compiled code asks nobody."""
        if not model.training and not torch.compiler.is_compiling():
            self._say("this evaluation on rank 0 is of", "around it, on all workers")

    def gives_state(self) -> None:
        """Somebody asks for the model's state."""
        self._say("this state_dict() on rank 0 is of", "around it, on all workers, or replica.save(folder)")

    def _before_state(self, model: nn.Module, *_: Any) -> None:
        caller = sys._getframe(2).f_globals.get("__name__", "")  # of the model's state_dict()
        if caller.partition(".")[0] != "thinwire":
            self.gives_state()

    def _say(self, what: str, remedy: str) -> None:
        replica = self._replica()
        if replica is None or replica.topology.rank or replica.holds_one_model:
            return
        self._replica = lambda: None
        log.warning(
            "%s the model of its own group only: groups train apart at step %d and hold different models. For their "
            "average use `with replica.merged():` %s",
            *(what, replica.step, remedy),
        )


def _ranks(ranks: Collection[int]) -> str:
    if not ranks:
        return ""
    low, high = min(ranks), max(ranks)
    return f" at rank {low}" if low == high else f" at ranks {low} to {high}"


def _full(kept: Iterable[Kept]) -> str:
    """Weights that stay full, grouped by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for each in kept:
        reasons[each.why].append(each.name.removesuffix(".weight"))
    parts = [f"{', '.join(names[:_NAMES])}{_more(len(names) - _NAMES)} ({why})" for why, names in reasons.items()]
    return f"; full: {'; '.join(parts)}" if parts else ""


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
