"""Workers of tests stay from case to case; a case that leaves something behind, dies or hangs fails by name."""

import os
import threading
import time
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_hook

import gang
from thinwire.comm import missing
from thinwire.elastic import stopping


def number(rank: int) -> int:
    return os.getpid()


def leave(rank: int, what: str) -> None:
    """Only the second worker does."""
    if rank == 1:
        LEFT[what]()


LEFT: dict[str, Any] = {
    "threads": lambda: threading.Thread(target=time.sleep, args=(60,), name="forgotten", daemon=True).start(),
    "environment": lambda: os.environ.update(FORGOTTEN="1"),
    "folder": lambda: os.chdir("/"),
    "global hooks": lambda: register_module_forward_hook(lambda *_: None),
    "changed": lambda: setattr(missing, "GRACE_S", 0.5),
    "requested stop": lambda: stopping.request("SIGTERM"),
}


def test_workers_stay() -> None:
    first = gang.run(number, 2)
    assert sorted(gang.run(number, 2)) == sorted(first)
    assert not set(gang.run(number, 2, fresh=True)) & set(first)


@pytest.mark.slow
@pytest.mark.parametrize("what", LEFT)
def test_what_a_case_leaves_behind_fails_it_and_the_next_has_other_workers(what: str) -> None:
    before = gang.run(number, 2)
    with pytest.raises(gang.WorkerFailed, match=rf"rank 1:\nleave left behind: {what}: "):
        gang.run(leave, 2, what)
    assert not set(gang.run(number, 2)) & set(before)
    gang.run(leave, 2, what, fresh=True)  # which is nobody's afterwards


def test_a_deadline_is_longer_where_a_step_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def paced(seconds: float) -> float:
        monkeypatch.setattr(gang, "run", lambda *_: [seconds, seconds / 2])
        return gang.patient(2.0)

    assert paced(0.1 * gang._QUIET_S) == paced(gang._QUIET_S) == 2.0  # never shorter
    assert paced(3 * gang._QUIET_S) == pytest.approx(6.0)  # by the slowest worker
    assert paced(1e9) == 2.0 * gang._AT_MOST


def ends(rank: int, how: str) -> None:
    if rank == 1:
        os._exit(3) if how == "dies" else time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [("dies", r"rank 1:\nthe worker died with exit code 3"), ("hangs", r"ranks \[.*1\] have not ended after 2 s")],
)
def test_a_worker_that_dies_or_hangs_is_replaced(how: str, said: str) -> None:
    with pytest.raises(gang.WorkerFailed, match=said):
        gang.run(ends, 2, how, timeout=2)
    assert len(gang.run(number, 2)) == 2
