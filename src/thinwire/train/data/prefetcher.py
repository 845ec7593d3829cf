"""Batches loaded while the step before them is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from types import TracebackType

import torch
from torch import Tensor

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
