"""A thread that communicates while the main thread computes."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from thinwire.base.errors import ThinwireError


class Background:
    """Runs what it is given in order, in one thread that ends when nobody can give it any more."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._under_way = 0
        # A daemon: at the end of a failed process nobody waits for a peer that will not answer.
        queues = self._work, self._done
        threading.Thread(target=_run, args=queues, name="thinwire-exchange", daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def submit(self, work: Callable[[], None]) -> None:
        """Run it after everything before it."""
        self._under_way += 1
        self._work.put(work)

    def join(self) -> None:
        """Wait for all of it; what failed first is raised here."""
        failed = [self._done.get() for _ in range(self._under_way)]
        self._under_way = 0
        if first := next((error for error in failed if error is not None), None):
            raise first

    def stop(self) -> None:
        """End the thread when its work is done."""
        self._work.put(None)


def _run(given: SimpleQueue[Callable[[], None] | None], done: SimpleQueue[BaseException | None]) -> None:
    while (work := given.get()) is not None:
        try:
            work()
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
        del work  # it may hold the replica, which would then never go


class EarlyBuckets:
    """Buckets of gradients, exchanged in order and in the background as soon as all gradients of one are there.

    The first backward pass shows how often each gradient arrives: more than once where a parameter is used in several
    checkpointed parts of the model. A gradient that arrives after its bucket was sent is an error.
    """

    def __init__(self, places: Sequence[Sequence[int]], exchange: Callable[[int], None]) -> None:
        self._exchange = exchange
        self._sizes = [len(place) for place in places]
        self._bucket_of = {i: number for number, place in enumerate(places) for i in place}
        self._expected: dict[int, int] | None = None
        self._background = Background()
        self._restart()

    def _restart(self) -> None:
        self._seen = dict.fromkeys(self._bucket_of, 0)
        self._missing = list(self._sizes)
        self._sent = 0

    def arrived(self, i: int, name: str) -> None:
        """The gradient of parameter `i` is there."""
        self._send_complete()  # now, not when it became complete: other hooks of its last gradient have run since
        self._seen[i] += 1
        number = self._bucket_of[i]
        if number < self._sent:
            raise ThinwireError(
                f"the gradient of {name!r} arrived again after it was averaged: the model used it more often than in "
                "its first backward pass; call every pass but the last of a step in no_sync(), or use wire='bf16'"
            )
        if self._expected is not None and self._seen[i] == max(1, self._expected[i]):
            self._missing[number] -= 1

    def finish(self) -> None:
        """The backward pass is over: exchange what is left, and wait for all."""
        if self._expected is None:
            self._expected = dict(self._seen)
        while self._sent < len(self._sizes):
            self._send()
        self._restart()
        self._background.join()

    def stop(self) -> None:
        """There will be no more."""
        self._background.stop()

    def _send_complete(self) -> None:
        while self._sent < len(self._sizes) and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        number = self._sent
        self._sent += 1
        self._background.submit(lambda: self._exchange(number))
