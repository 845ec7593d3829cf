"""What clouds say before they take a spot machine away, half a minute to two before: it counts as a SIGTERM.

Each answers at an address of its own inside the machine; one process of a machine asks every few seconds.
"""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from thinwire.base.errors import one_line
from thinwire.elastic import stopping

log = logging.getLogger("thinwire")

_EVERY_S, _ANSWER_S = 5.0, 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""These addresses are inside the machine, whatever proxy it has for others."""
_GONE = 404
_TAKEN = ("Preempt", "Terminate")


def _read(url: str, method: str = "GET", **headers: str) -> str | None:
    """What an address answers; None if it has nothing to say."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with _DIRECT.open(urllib.request.Request(url, method=method, headers=fields), timeout=_ANSWER_S) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        if error.code == _GONE:
            return None
        raise


def _aws(address: str) -> str | None:
    token = _read(f"{address}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60") or ""
    text = _read(f"{address}/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token)
    found: dict[str, Any] = json.loads(text) if text else {}
    return f"{found.get('action')} at {found.get('time')}" if found else None


def _gcp(address: str) -> str | None:
    text = _read(f"{address}/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google")
    return "preempted" if (text or "").strip() == "TRUE" else None


def _azure(address: str) -> str | None:
    text = _read(f"{address}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
    events = json.loads(text or "{}").get("Events", [])
    return next((f"{e['EventType']} not before {e.get('NotBefore')}" for e in events if e["EventType"] in _TAKEN), None)


class Cloud(NamedTuple):
    """Where a cloud answers, and how it is asked: what it says of this machine's end, if it says something."""

    address: str
    ask: Callable[[str], str | None]


CLOUDS = {
    "aws": Cloud("http://169.254.169.254", _aws),
    "gcp": Cloud("http://metadata.google.internal", _gcp),
    "azure": Cloud("http://169.254.169.254", _azure),
}


class Notices:
    """Asks a cloud from a thread, until it says that this machine is taken away, or `close()`."""

    def __init__(self, cloud: str, every: float = _EVERY_S) -> None:
        self._cloud, self._every, self._name = CLOUDS[cloud], every, cloud
        self._over, self._failed = threading.Event(), False
        threading.Thread(target=self._run, daemon=True, name="thinwire-notices").start()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                notice = self._cloud.ask(self._cloud.address)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # no answer, or another one
                notice = None
                if not self._failed:
                    log.warning("no notices from %s at %s: %s", self._name, self._cloud.address, one_line(error))
                self._failed = True
            if notice is not None:
                log.warning("%s says that this machine is taken away (%s)", self._name, notice)
                stopping.request("SIGTERM")
                return
            self._over.wait(self._every)
