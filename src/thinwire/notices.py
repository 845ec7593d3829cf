"""One or two log lines of a replica: what it trains and how, and the result.

Messages go to the logger "thinwire". If a script has not set up logging, they go to the standard error of rank 0;
`logging.getLogger("thinwire").setLevel(logging.WARNING)` silences them.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable

from thinwire import units
from thinwire.config.timed import Timed
from thinwire.factor.convert import Kept
from thinwire.methods.base import Method

log = logging.getLogger("thinwire")
_NAMES = 3


def ensure_logging() -> None:
    """Log to standard error if the script has not set up logging."""
    if not log.hasHandlers() and log.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("thinwire: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


def log_attached(method: Method, trained: int) -> None:
    """Log workers and size, and for methods that factor how many weights they will factor."""
    if method.topology.rank:
        return
    workers, groups = method.topology.world_size, len(method.topology.groups)
    who = f"{_count(workers, 'worker')} in {_count(groups, 'group')}" if workers > 1 else "one worker"
    text = f"{type(method.config).__name__} on {who}: {trained:,} parameters to train"
    if method.layers:
        text += f", {len(method.layers)} weights to factor{_full(method.kept)}"
    log.info(text)
    if isinstance(method.config, Timed):
        if method.config.chosen:
            log.info(method.config.chosen)
        if method.config.idle:
            log.warning(method.config.idle)


def log_past_end(method: Method) -> bool:
    """Log that training goes on past `total_steps`, if it does; returns whether."""
    total = getattr(method.config, "total_steps", None)  # a config of one's own may have it too
    if total is None or method.step <= total:
        return False
    if not method.topology.rank:
        log.warning("step %d is beyond total_steps=%d: training stays in phase %r", method.step, total, method.phase)
    return True


def log_finished(method: Method, sizes: tuple[int, int], ranks: Collection[int], usual_bytes: int) -> None:
    """Log size before and after, what was factored, and bytes sent compared with fp32 all-reduce."""
    if method.topology.rank:
        return
    name, (before, after) = type(method.config).__name__, sizes
    text = f"{name} finished after {_count(method.step, 'step')}"
    if method.layers:
        text += f": {before:,} parameters are now {after:,} ({before / max(1, after):.2f} : 1), "
        text += f"{_count(len(ranks), 'weight')} factored{_ranks(ranks)}{_full(method.kept)}"
    if usual_bytes:
        ledger = method.wire.ledger
        sent = ledger.slow_bytes - ledger.slow_bytes_for("evaluate")
        text += f"; {units.size(sent)} left this node, {sent / usual_bytes:.3g} of fp32 all-reduce's "
        text += units.size(usual_bytes)
    log.info(text)
    if method.layers and not method.decompositions:
        if getattr(method, "must_factor", False):
            log.warning("%s ended before it factored anything, so the model stays full; finish(cutoff=…) cuts it", name)
    elif method.step and method.missed:
        log.warning("%s %s: the run was too short for its settings", name, method.missed)
    elif method.layers and after >= before:
        log.warning("%s did not make the model smaller; use a higher cutoff, here or in finish(cutoff=…)", name)


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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
