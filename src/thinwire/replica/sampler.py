"""Samples that follow membership: each counts once in an epoch, whatever groups die, join or leave out steps."""

from collections import deque
from collections.abc import Callable, Iterator, Sized
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import Sampler

from thinwire.base.checks import is_whole
from thinwire.base.errors import ConfigError
from thinwire.replica.replica import Replica


class ElasticSampler(Sampler[list[int]]):
    """Batches of samples for this worker, dealt again whenever groups come or go; on all workers, after `attach`.

        sampler = thinwire.ElasticSampler(dataset, replica, batch_size=32, seed=0)
        batches = sampler.batches(DataLoader(dataset, batch_sampler=sampler, num_workers=4))
        for step in replica.steps(10 * len(sampler), folder="saves", save_every=500):
            x, y = next(batches)

    A sample counts when an average that contains it is made. What a lost group trained since its last average is dealt
    to the others, and so is what it had still to train; what a step that is skipped was computed from comes again. One
    epoch follows another: those that are slower may be in the one before for a while. `replica.save` and `load` hold
    the place, also for another number of workers.
    """

    def __init__(
        self, dataset: Sized, replica: Replica, *, batch_size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        if not isinstance(replica, Replica):
            raise ConfigError(f"ElasticSampler takes a replica, not {type(replica).__name__}; make it after attach()")
        if not hasattr(dataset, "__len__") or not len(dataset):
            raise ConfigError(
                f"ElasticSampler deals samples by number, and {type(dataset).__name__} has no length, or no samples"
            )
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if not is_whole(value, least):
                raise ConfigError(f"`{name}`={value!r} of ElasticSampler must be a whole number from {least} on")
        self.batch_size, self._count = batch_size, len(dataset)
        self._sizes: deque[int] = deque()
        self._order = lru_cache(2)(_order(self._count, seed, shuffle))
        about = {"samples": self._count, "seed": seed, "shuffle": shuffle}
        self._deal = replica._state.add_data(about)

    def __len__(self) -> int:
        """Batches of this worker in an epoch, with as many workers as there are now."""
        return -(-self._count // (self._deal.size * self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        """This worker's batches from here on, as samples' numbers, without end; a DataLoader may be ahead."""
        sizes, place, number = deque[int](), self._deal.drawn, self._deal.number
        self._sizes = sizes
        while number == self._deal.number:
            tickets = self._deal.own(place, place + self.batch_size)
            place += len(tickets)
            sizes.append(len(tickets))
            yield [self.sample(int(ticket)) for ticket in tickets]

    def sample(self, ticket: int) -> int:
        """The number of a ticket's sample."""
        epoch, place = divmod(ticket, self._count)
        return int(self._order(epoch)[place])

    def batches(self, loader: Any) -> Iterator[Any]:
        """What a DataLoader makes of this sampler's batches, without end; what it prepared too early is not used."""
        while True:
            number = self._deal.number
            for batch in loader:
                if number != self._deal.number:  # dealt again meanwhile: this may be another's by now
                    break
                self._deal.drawn += self._sizes.popleft()
                yield batch

    @property
    def counted(self) -> int:
        """Samples that count so far, of all workers."""
        return self._deal.counted

    @property
    def epoch(self) -> float:
        """How many epochs these are."""
        return self.counted / self._count


def _order(count: int, seed: int, shuffle: bool) -> Callable[[int], Any]:
    def order(epoch: int) -> Any:
        if not shuffle:
            return range(count)
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch))

    return order
