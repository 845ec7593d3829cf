"""Which backend carries what, and by which interface; nccl itself is for `make test-gpu`."""

import os

import pytest
import torch
from torch import nn

import gang
import thinwire
from thinwire.base.errors import ConfigError
from thinwire.comm import backends
from thinwire.comm.topology import Topology


def attach(config: thinwire.AllReduce, **more: str) -> thinwire.Replica:
    model = nn.Linear(2, 2)
    return thinwire.attach(model, torch.optim.SGD(model.parameters(), 0.1), config, **more)


def test_unknown_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown slow_backend 'mpi', choose from: gloo, nccl"):
        attach(thinwire.AllReduce(), slow_backend="mpi")
    monkeypatch.setenv("THINWIRE_SLOW_BACKEND", "")
    with pytest.raises(ConfigError, match="unknown THINWIRE_SLOW_BACKEND '', choose"):
        attach(thinwire.AllReduce())
    with pytest.raises(ConfigError, match=r"`slow_backend`='nccl' with faults=….*leave it out"):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        thinwire.attach(model, optimizer, thinwire.LocalSGD(), faults=thinwire.Faults(), slow_backend="nccl")


def by_nccl_on_cpus(rank: int) -> str:
    assert attach(thinwire.AllReduce(), slow_backend="gloo").wire.backends.between is None
    with pytest.raises(ConfigError) as found:
        attach(thinwire.AllReduce(), slow_backend="nccl")
    return str(found.value)


def test_nccl_is_refused_where_tensors_are_not_on_gpus() -> None:
    for said in gang.run(by_nccl_on_cpus, 2):
        assert said.startswith("`slow_backend`='nccl', but torch.distributed carries tensors of this cpu by gloo")


def test_one_variable_chooses_the_interface_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in backends.SOCKETS:
        monkeypatch.setenv(name, "before")  # put back afterwards
        monkeypatch.delenv(name)
    backends.take_interface()
    assert not set(backends.SOCKETS) & os.environ.keys()
    monkeypatch.setenv("THINWIRE_INTERFACE", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    attach(thinwire.AllReduce())
    assert [os.environ[name] for name in backends.SOCKETS] == ["lo", "ib0"]


def test_nccl_sends_what_its_tree_and_its_chain_send() -> None:
    """As counted by the kernel on two machines with two GPUs each: benchmarks/gpu has it."""
    nodes = ((0, 1), (2, 3))
    ring, tree = (Topology(0, nodes, nodes, algorithm) for algorithm in ("ring", "tree"))
    world = ring.world
    assert ring.all_reduce(world, 4000).slow == 6000 and tree.all_reduce(world, 4000).slow == 4000
    assert [(tree.seen_from(rank)).broadcast(world, 400, 0).slow for rank in world] == [400, 400, 0, 0]
    assert [(tree.seen_from(rank)).broadcast(world, 400, 1).slow for rank in world] == [400] * 4, "around the ring"
    assert ring.broadcast(world, 400, 0).slow == 800
    assert tree.spans_machines(world) and not tree.spans_machines((2, 3))


def test_what_nccl_was_told_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, algorithm in ((None, "tree"), ("ring;allreduce:tree", "tree"), ("Ring", "ring")):
        if told is None:
            monkeypatch.delenv("NCCL_ALGO", raising=False)
        else:
            monkeypatch.setenv("NCCL_ALGO", told)
        assert backends.Backends(between="nccl").algorithm == algorithm
        assert backends.Backends(between="gloo").algorithm == "ring"


def test_tensors_of_the_cpu_are_carried_beside_nccl() -> None:
    assert backends.Backends(between="nccl").across(far=True) == "cpu:gloo,cuda:nccl"
    assert [backends.Backends(between=name).across(far=True) for name in ("gloo", None)] == ["gloo", None]
    assert backends.Backends(between="nccl").across(far=False) is None


def test_nccl_stays_inside_groups_that_may_be_lost() -> None:
    cuda, both = torch.device("cuda"), "cpu:gloo,cuda:nccl"
    found = backends.where_groups_may_be_lost(both, cuda)
    assert (found.across(far=False), found.across(far=True), found.algorithm) == (both, None, "ring")
    for own, device in (("gloo", cuda), (both, torch.device("cpu"))):
        assert backends.where_groups_may_be_lost(own, device).across(far=False) is None
