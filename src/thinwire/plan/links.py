"""How long collectives take over given links."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.base.errors import ConfigError
from thinwire.comm.sent import Sent

PAYLOAD = 0.935
"""Share of an Ethernet link that TCP leaves to payload: 1448 of 1514 bytes per packet, less acknowledgements."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Both links: bandwidth in bits per second each way, latency in seconds one way."""

    bandwidth: float = 1e9
    """Between nodes, of each node's link."""
    latency: float = 50e-6
    """Between nodes."""
    fast_bandwidth: float = 100e9
    """Inside a node, from one worker to another."""
    fast_latency: float = 5e-6
    """Inside a node."""
    overhead: float = 100e-6
    """What a collective costs besides its bytes: software, threads that wake up, the slowest worker's delay."""
    payload: float = PAYLOAD
    """Share of the slow link's bandwidth that is left to payload."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "fast_bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`{name}`={getattr(self, name)!r} must be above 0 bits per second, such as 1Gbit")
        for name in ("latency", "fast_latency", "overhead"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"`{name}`={getattr(self, name)!r} must be a time of 0 or more, such as 50us")
        if not 0 < self.payload <= 1:
            raise ConfigError(f"`payload`={self.payload!r} must be a share above 0, up to 1")

    def seconds(self, sent: Sent) -> float:
        """A collective alone on the links: bytes that queue at the narrowest place, and its rounds' latencies."""
        if not (sent.slow_queue or sent.fast_queue):
            return 0.0
        slow = 8 * sent.slow_queue / (self.bandwidth * self.payload)
        fast = 8 * sent.fast_queue / self.fast_bandwidth
        return self.overhead + max(slow, fast) + sent.slow_rounds * self.latency + sent.fast_rounds * self.fast_latency

    def exposed(self, parts: Sequence[Sent], ready: Sequence[float], end: float) -> float:
        """How long workers wait after `end` for parts that start one after the other, each when it is ready."""
        free = 0.0
        for sent, start in zip(parts, ready, strict=True):
            free = max(free, start) + self.seconds(sent)
        return max(0.0, free - end)
