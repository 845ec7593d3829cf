"""Search with Optuna on one machine, with the same spaces, objectives and trials as with Propulate."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from thinwire.base.errors import ConfigError
from thinwire.tuning.evaluate import Ranks, devices_for, evaluate
from thinwire.tuning.search import Search, Trial

SAMPLERS = ("optuna", "random")
"""Optuna's default, TPE; and its random sampler, which any search should beat."""


def search_by_optuna(search: Search, sampler: str, trials: int, at_once: int = 1) -> None:
    """Run so many trials, some of them side by side."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("`--engine optuna` needs the package optuna: pip install 'thinwire[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    begun = search.trials()
    chance = (search.seed + 1_000_003 * len(begun)) % 2**32
    kinds = {"optuna": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study = optuna.create_study(sampler=kinds[sampler](seed=chance))
    ranges = {name: _distribution(optuna, search, name) for name in search.space}
    for trial in begun:
        if trial.has_ended:
            study.add_trial(optuna.trial.create_trial(params=trial.codes, distributions=ranges, value=trial.loss))
    running: dict[Future[float], Any] = {}
    to_come = _to_come(search, study, ranges, begun, trials)
    with ThreadPoolExecutor(at_once) as pool:
        free, first = list(range(at_once)), True
        try:
            while True:
                while free and (first or search.has_time) and (coming := next(to_come, None)) is not None:
                    first = False  # one begins in any case: a resumed search may have but little left to do
                    asked, trial = coming
                    slot = free.pop(0)
                    workers = search.job.workers
                    ranks = Ranks(workers, devices_for(range(slot * workers, (slot + 1) * workers)))
                    running[pool.submit(evaluate, search, trial, ranks)] = (asked, slot)
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    asked, slot = running.pop(done)
                    free.append(slot)
                    study.tell(asked, done.result())
        except BaseException:  # such as Ctrl-C: the pool waits for the trials that run
            search.is_interrupted = True
            raise


def _to_come(search: Search, study: Any, ranges: Any, begun: list[Trial], trials: int) -> Iterator[tuple[Any, Trial]]:
    """First what a killed search had begun or the usual settings, then what the sampler proposes."""
    for trial in begun:
        if not trial.has_ended:
            study.enqueue_trial(trial.codes)
            yield study.ask(ranges), trial
    if not begun:
        study.enqueue_trial(search.usual())
    for _ in range(len(begun), trials):
        asked = study.ask(ranges)
        yield asked, search.begin(asked.params)


def _distribution(optuna: Any, search: Search, name: str) -> Any:
    """A parameter's codes as Optuna sees them: it knows choices, and logarithms are taken already."""
    parameter = search.space[name]
    low, high = parameter.limits
    if parameter.choices:
        return optuna.distributions.CategoricalDistribution(tuple(range(len(parameter.choices))))
    kind = optuna.distributions.IntDistribution if parameter.is_whole else optuna.distributions.FloatDistribution
    return kind(low, high)
