"""The links of a job, measured by all of its workers, and which of them is slow."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from thinwire.comm import probe
from thinwire.comm.ledger import sent_by_interface
from thinwire.comm.roll_call import RollCall
from thinwire.plan.forecast import PAYLOAD, Links

_SLOW = 0.5
"""A link below this share of the fastest one's rate is named."""


def measured(call: RollCall, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rates, round trips and interfaces of all links; collective, after `call.connect()`."""
    inside, between = probe.rings([tuple(node["ranks"]) for node in nodes])
    found: dict[str, Any] = {}
    for name, edges in (("inside", inside), ("between", between)):
        before = sent_by_interface()
        links = probe.measure(edges)
        after = sent_by_interface()
        # The interface of each worker that has sent most since.
        used = call.answers(max(after, key=lambda name: after[name] - before.get(name, 0), default=None))
        found[name] = [_described(asdict(link), used[link.source], between=name == "between") for link in links]
    slowest = found["between"] or found["inside"]
    found["overhead_s"] = probe.overhead(max((link["round_trip_s"] for link in slowest), default=0.0) / 2)
    return found


def _described(link: dict[str, Any], interface: str | None, *, between: bool) -> dict[str, Any]:
    """A link with its interface; between nodes its rate is the link's own, with the headers that payload travels in."""
    payload = link["bits_per_second"]
    rate = payload / PAYLOAD if between else payload
    return link | {"bits_per_second": rate, "payload_bits_per_second": payload, "interface": interface}


def slow_links(links: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Links much slower than the fastest one, the slowest first."""
    fastest = max((link["bits_per_second"] for link in links), default=0.0)
    below = [link for link in links if link["bits_per_second"] < _SLOW * fastest]
    return sorted(below, key=lambda link: link["bits_per_second"])


def for_plan(found: dict[str, Any]) -> Links:
    """The links as a plan takes them: a ring goes at the rate of its slowest link.

    Where all workers are on one machine, the links between them stand for those between nodes.
    """
    fast = _worst(found["inside"], "fast_") if found["inside"] else {}
    slow = _worst(found["between"] or found["inside"], "")
    payload = PAYLOAD if found["between"] else 1.0
    return Links(**slow, **fast, overhead=found["overhead_s"], payload=payload)


def _worst(links: Sequence[dict[str, Any]], prefix: str) -> dict[str, float]:
    rate = min(link["bits_per_second"] for link in links)
    return {f"{prefix}bandwidth": rate, f"{prefix}latency": max(link["round_trip_s"] for link in links) / 2}
