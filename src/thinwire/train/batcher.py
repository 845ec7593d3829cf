"""The batches of a run, on its device and ready for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.train.data import Batches, Source, share
from thinwire.train.step_rng import StepRNG
from thinwire.train.task import Recipe

Batch = tuple[Tensor, Tensor]


class _End:
    """Marks the end of the batches, or an error in place of one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Prefetcher:
    """`load(step)` for each step in order, up to `depth` steps ahead, in one thread.

    Use it as `with Prefetcher(load, steps) as batches: for x, y in batches: …`; leaving the block ends the thread.
    What `load` raises is raised where the batch was asked for. `load` must not draw from the global random state, which
    the training thread draws from at the same time. Where there is CUDA, batches come in pinned memory.
    """

    def __init__(self, load: Callable[[int], Batch], steps: Iterable[int], *, depth: int = 2) -> None:
        self._load, self._steps = load, steps
        self._free = Semaphore(depth)
        self._ready: SimpleQueue[Batch | _End] = SimpleQueue()
        self._stopped = Event()
        self._over = False
        # A new thread starts on the first device; pinning there would take memory on it for every worker.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = Thread(target=self._fill, name="thinwire-prefetcher", daemon=True)
        self._started = False

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Batch:
        if self._over:
            raise StopIteration
        if not self._started:
            # Not earlier: an interrupt before the block is entered would leave the thread running.
            self._started = True
            self._thread.start()
        loaded = self._ready.get()
        self._free.release()
        if not isinstance(loaded, _End):
            return loaded
        self._over = True
        if loaded.error is not None:
            raise loaded.error
        raise StopIteration

    def close(self) -> None:
        """End the thread after the batch that it is loading; drop what was loaded."""
        self._over = True
        self._stopped.set()
        self._free.release()
        if self._started:
            self._thread.join()

    def _fill(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            for step in self._steps:
                self._free.acquire()
                if self._stopped.is_set():
                    return
                self._ready.put(self._pinned(self._load(step)))
            self._ready.put(_End())
        except BaseException as error:  # whatever it is, it must be raised where the batch is waited for
            self._ready.put(_End(error))

    def _pinned(self, batch: Batch) -> Batch:
        if self._device is None:
            return batch
        x, y = (t if t.is_cuda else t.pin_memory() for t in batch)
        return x, y


_MOST = {"cpu": 256, "cuda": 1024}
"""Most examples per evaluation batch; it is never larger than a training batch, so it needs no more memory."""


class Batcher:
    """One worker's batches. Data that fits is held on the device; a streamed source is prefetched."""

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        device: torch.device,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(signature(source.train).parameters) < 2:
            raise ConfigError(
                f"`train` of the source {type(source).__name__} takes indices alone; "
                "write `def train(self, indices, rng=None)`, and take random numbers from `rng`"
            )
        self.source: Source = source.to(device) if hasattr(source, "to") else source
        self._transform = recipe.transform
        self._device = device
        self._batches = Batches(size=source.train_size, batch=recipe.batch, seed=seed)
        self._seed = seed
        self._place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        self._piece = min(_MOST[device.type], max(1, recipe.batch // world_size))

    def batch(self, step: int) -> Batch:
        """This worker's share of the batch of a step."""
        return self._finished(self._read(step), step)

    @contextmanager
    def steps(self, steps: range) -> Iterator[Iterator[Batch]]:
        """The batches of these steps, in order."""
        if not getattr(self.source, "streamed", False):
            yield map(self.batch, steps)
            return
        with Prefetcher(self._read, steps) as read:
            yield (self._finished(batch, step) for step, batch in zip(steps, read, strict=True))

    @contextmanager
    def by_step(self, last: int) -> Iterator[Callable[[int], Batch]]:
        """The batch of a step up to `last`, read ahead as long as steps follow one another."""
        with ExitStack() as reading:
            batches: Iterator[Batch] = iter(())
            due = -1

            def batch(step: int) -> Batch:
                nonlocal batches, due
                if step != due:
                    reading.close()
                    batches = reading.enter_context(self.steps(range(step, last)))
                due = step + 1
                return next(batches)

            yield batch

    def example(self, count: int = 2) -> Tensor:
        """A few inputs of the model."""
        x, _ = self.source.heldout(np.arange(count) % self.source.heldout_size)
        return self._transform.heldout(x.to(self._device))

    def parts(self, part: str = "heldout", rank: int | None = None, world_size: int | None = None) -> Iterator[Batch]:
        """A worker's share of the held-out data, or of another part, in batches; by default its share of a batch."""
        size, read = getattr(self.source, f"{part}_size"), getattr(self.source, part)
        place = self._place if rank is None else {"rank": rank, "world_size": world_size}
        mine = share(np.arange(size), **place)
        for piece in np.array_split(mine, max(1, -(-len(mine) // self._piece))):
            if len(piece):
                x, y = read(piece)
                yield self._transform.heldout(x.to(self._device)), y.to(self._device)

    def _read(self, step: int) -> Batch:
        """A batch as it is stored."""
        mine = share(self._batches.indices(step), **self._place)
        return self.source.train(mine, self._rng(step))

    def _finished(self, batch: Batch, step: int) -> Batch:
        x, y = (t.to(self._device, non_blocking=True) for t in batch)
        return self._transform.train(x, self._rng(step, stream=1, device=self._device)), y

    def _rng(self, step: int, **where: Any) -> StepRNG:
        return StepRNG(self._seed, step, batch=self._batches.batch, **self._place, **where)
