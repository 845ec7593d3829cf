"""Clouds that take a machine away, as their own addresses say it."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import small
import thinwire
from launchers import Launchers
from patience import until
from test_faults import TIMEOUT
from thinwire import ConfigError, Faults, LocalSGD
from thinwire.elastic import stopping
from thinwire.elastic.notices import CLOUDS, Cloud, Notices

TAKEN = {
    "aws": ("/latest/meta-data/spot/instance-action", '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}'),
    "gcp": ("/computeMetadata/v1/instance/preempted", "TRUE"),
    "azure": (
        "/metadata/scheduledevents?api-version=2020-07-01",
        json.dumps({"Events": [{"EventType": "Preempt", "NotBefore": "soon"}]}),
    ),
}
USUAL = {
    "/computeMetadata/v1/instance/preempted": "FALSE\n",
    TAKEN["azure"][0]: '{"Events": [{"EventType": "Reboot"}]}',
}
ASKED_BY = {"gcp": ("Metadata-Flavor", "Google"), "azure": ("Metadata", "true")}


class Metadata(BaseHTTPRequestHandler):
    """All three clouds' answers; those that need a header refuse who does not send it."""

    answers: dict[str, str] = {}

    def do_PUT(self) -> None:
        self._say("secret" if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers else None, 400)

    def do_GET(self) -> None:
        cloud = next((name for name, (path, _) in TAKEN.items() if path == self.path), "")
        name, value = ASKED_BY.get(cloud, ("X-aws-ec2-metadata-token", "secret"))
        allowed = self.headers[name] == value
        self._say(self.answers.get(self.path) if allowed else None, 404 if allowed else 403)

    def _say(self, text: str | None, otherwise: int) -> None:
        self.send_response(otherwise if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    Metadata.answers = dict(USUAL)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("cloud", TAKEN)
def test_a_notice_counts_as_a_signal(
    cloud: str, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(CLOUDS, cloud, Cloud(address, CLOUDS[cloud].ask))
    monkeypatch.setattr(stopping, "_requested", [])
    assert CLOUDS[cloud].ask(address) is None
    asking = Notices(cloud, 0.02)
    path, text = TAKEN[cloud]
    assert stopping.requested() is None
    Metadata.answers[path] = text
    with caplog.at_level(logging.WARNING):
        until(stopping.requested, "the notice")
    assert stopping.requested() == "SIGTERM" and f"{cloud} says that this machine is taken away" in caplog.text
    asking.close()


def test_a_cloud_that_does_not_answer_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def ask(address: str) -> None:
        asked.append(address)
        raise OSError("Network is unreachable")

    monkeypatch.setitem(CLOUDS, "aws", Cloud("http://nowhere", ask))
    with caplog.at_level(logging.WARNING):
        asking = Notices("aws", 0.01)
        until(lambda: len(asked) > 3, "some tries")
    asking.close()
    assert caplog.text.count("no notices from aws at http://nowhere: OSError: Network is unreachable") == 1
    assert stopping.requested() is None


def test_other_clouds_are_refused() -> None:
    with pytest.raises(ConfigError, match="`notices`='ibm' must be None, 'aws', 'gcp' or 'azure'"):
        Faults(notices="ibm")


def on_a_spot_machine(group: int, worker: int, address: str) -> Any:
    """Group 1 is taken away after some steps; its cloud says so."""
    CLOUDS["aws"] = Cloud(address if group == 1 else f"{address}/others", CLOUDS["aws"].ask)
    model = small.mlp()
    optimizer = small.sgd(model)
    faults = Faults(timeout=TIMEOUT, notices="aws", on_term="leave")
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4), faults=faults)
    events = replica._recovery.membership
    for step in replica.steps(400):
        if len(events.groups) == 2 and step > 40:
            return {"bits": small.model_bits(replica.finish()), "events": replica.events}
        small.step(replica, optimizer, group, step)
    raise AssertionError("nobody has left")


@pytest.mark.slow
def test_a_group_whose_machine_is_taken_away_leaves(address: str) -> None:
    launchers = Launchers(on_a_spot_machine, 3, 1, address)
    launchers.wait_for("run")
    Metadata.answers[TAKEN["aws"][0]] = TAKEN["aws"][1]
    found = launchers.collect(timeout=100)
    assert found.keys() == {(0, 0), (2, 0)}, found  # group 1 has ended with exit code 75
    assert found[0, 0] == found[2, 0] and [event["lost"] for event in found[0, 0]["events"]] == [[1]]
