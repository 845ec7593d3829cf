"""The design's invariants 1 to 5 and 8, on one to four real workers."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gang
import needs
import thinwire
from device import here
from selection import first_of
from sockets import needs_counts, socket_bytes
from thinwire.comm.replicate import Replicated
from thinwire.factor import export, ranks
from thinwire.methods import PaperAB
from thinwire.netbench import hosts
from worlds import ab, adamw, batch, optimizer_values, small_model, train_step, values

LAYOUTS = [(4, 1), (4, 2), (4, "world"), (3, 1), (3, 2), (2, 1), (1, None)]


# Invariant 1: attaching and finishing changes nothing.


@pytest.mark.parametrize("config", [ab(), ab(warmup=0, cutoff=0.001), thinwire.AllReduce()])
def test_attach_and_finish_without_a_step_is_the_identity(config: Any) -> None:
    model = small_model().eval()
    x, _ = batch(0, 0)
    before = model(x).detach()
    replica = thinwire.attach(model, adamw(model), config if config != ab() else ab(group_size=None))
    small = replica.eval().finish(cutoff=0)
    torch.testing.assert_close(small(x), before, rtol=1e-5, atol=1e-5)
    assert replica.module is small and replica.phase == "finished"


# Invariant 2: alone, a method is the bare optimizer.


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (thinwire.AllReduce(), 12),
        (ab(total_steps=30, warmup=12), 12),
        (thinwire.OIALR(total_steps=30, factor_at=12), 12),
    ],
)
def test_alone_it_trains_bit_for_bit_as_the_bare_optimizer(config: Any, steps: int) -> None:
    bare, model = small_model(), small_model()
    bare_optimizer, optimizer = adamw(bare), adamw(model)
    replica = thinwire.attach(model, optimizer, config)
    for step in range(steps):
        assert train_step(bare, bare_optimizer, step, 0) == train_step(replica, optimizer, step, 0)
        if step < steps - 1:
            assert values(bare) == values(replica)
    assert replica.phase == {PaperAB: "groups", thinwire.OIALR: "lowrank"}.get(type(config), "train")


# Invariant 3: AllReduce is DistributedDataParallel.


def ddp_and_ours(rank: int) -> tuple[list[int], list[int]]:
    theirs, ours = small_model(rank), small_model(rank)
    their_optimizer, optimizer = adamw(theirs), adamw(ours)
    ddp = DistributedDataParallel(theirs)
    replica = thinwire.attach(ours, optimizer, thinwire.AllReduce())
    left, right = [], []
    for step in range(6):
        train_step(ddp, their_optimizer, step, rank)
        train_step(replica, optimizer, step, rank)
        left.append(values(nn.ModuleList([theirs]) if rank == 0 else _without_buffers(theirs)))
        right.append(values(nn.ModuleList([ours]) if rank == 0 else _without_buffers(ours)))
    return left, right


def _without_buffers(model: nn.Module) -> nn.Module:
    # DDP hands buffers on before the next forward pass, we after the step: between steps only rank 0's compare.
    return nn.ParameterList(model.parameters())


def first_steps(rank: int) -> list[tuple[int, int]]:
    """Values and optimizer state after five steps by methods whose warm-up is all-reduce."""
    configs = [thinwire.AllReduce(), *(ab(warmup=6, group_size=size) for size in (1, 2, "world"))]
    configs.append(thinwire.OIALR(total_steps=30, factor_at=6))
    found = []
    for config in configs:
        model = small_model(rank)
        optimizer = adamw(model)
        replica = thinwire.attach(model, optimizer, config)
        for step in range(5):
            train_step(replica, optimizer, step, rank)
        found.append((values(replica), optimizer_values(optimizer)))
        replica.detach()
    return found


def test_a_warm_up_is_all_reduce_bit_for_bit() -> None:
    """So runs of these methods may share their first steps."""
    for plain, *others in gang.run(first_steps, 3):
        assert others == [plain] * len(others)


@pytest.mark.parametrize("workers", first_of([3, 2, 4]))
def test_allreduce_equals_ddp_bit_for_bit(workers: int) -> None:
    for theirs, ours in gang.run(ddp_and_ours, workers):
        assert theirs == ours


def bf16_wire(rank: int) -> tuple[float, int, int]:
    torch.set_num_threads(1)
    model, exact = small_model(), small_model()
    optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(exact.parameters(), 0.1)
    rounded = thinwire.attach(model, optimizers[0], thinwire.AllReduce(wire="bf16"))
    plain = thinwire.attach(exact, optimizers[1], thinwire.AllReduce())
    for step in range(2):
        train_step(rounded, optimizers[0], step, rank)
        train_step(plain, optimizers[1], step, rank)
    gap = max(float((p - q).abs().max()) for p, q in zip(model.parameters(), exact.parameters(), strict=True))
    gradients = [r.traffic.by_purpose["gradients"]["slow_bytes"] for r in (rounded, plain)]
    assert values(model) != values(exact)
    return gap, int(gradients[0]), int(gradients[1])


def test_a_bf16_wire_halves_the_bytes_and_rounds_little() -> None:
    for gap, rounded, plain in gang.run(bf16_wire, 2):
        assert gap < 5e-3
        assert 2 * rounded == plain


class Phases(nn.Module):
    """A complex parameter and a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter, self.head = nn.Parameter(torch.randn(9, dtype=torch.complex64)), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x.flatten(1)) * self.filter, n=16))


def complex_over(rank: int, config: Any) -> tuple[torch.Tensor, int]:
    """How far a complex parameter comes in three steps, and what was sent for it."""
    model = here(Phases())
    start, optimizer = model.filter.detach().clone(), torch.optim.SGD(model.parameters(), 1.0)
    replica = thinwire.attach(model, optimizer, config)
    for step in range(3):
        train_step(replica, optimizer, step, rank)
    sent = replica.traffic.by_purpose["merge" if isinstance(config, thinwire.LocalSGD) else "gradients"]["slow_bytes"]
    return torch.view_as_real(model.filter.detach() - start).cpu(), int(sent)


def complex_over_every_wire(rank: int) -> dict[str, tuple[torch.Tensor, int]]:
    configs = {
        wire: (thinwire.AllReduce(wire=wire), thinwire.LocalSGD(every=1, wire=wire)) for wire in ("fp32", "bf16")
    }
    return {f"{wire} {i}": complex_over(rank, c) for wire, both in configs.items() for i, c in enumerate(both)}


def test_a_bf16_wire_carries_both_parts_of_a_complex_number_and_counts_them() -> None:
    for found in gang.run(complex_over_every_wire, 2):
        for method in ("0", "1"):
            (exact, full), (rounded, half) = found[f"fp32 {method}"], found[f"bf16 {method}"]
            torch.testing.assert_close(rounded, exact, rtol=0.02, atol=2e-3)
            assert 2 * half == full
        assert exact[:, 1].abs().max() > 0.02, "nothing to lose"


# Invariant 4: after every merge and every step of a phase that spans the world, all workers agree.


def trajectory(rank: int, settings: dict[str, Any], kind: str = "adamw") -> list[tuple[str, bool, int, int, str]]:
    model = small_model(rank)
    optimizer = adamw(model) if kind == "adamw" else torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    replica = thinwire.attach(model, optimizer, ab(**settings))
    trace = []
    for step in range(24):
        loss = train_step(replica, optimizer, step, rank)
        replica.observe(loss)
        ranks = str(replica.ranks())
        trace.append((replica.phase, replica.in_sync, values(replica), optimizer_values(optimizer), ranks))
    return trace


def assert_agreement(traces: list[list[tuple[str, bool, int, int, str]]]) -> None:
    first = traces[0]
    assert {phase for phase, *_ in first} == {"warmup", "groups", "rebound", "final"}
    assert any(ranks != "{}" for *_, ranks in first), "nothing was ever factored"
    for trace in traces[1:]:
        for mine, theirs in zip(first, trace, strict=True):
            assert mine[0] == theirs[0] and mine[4] == theirs[4]
            if mine[1]:
                assert mine == theirs


MERGES = [(merge, moments) for moments in ("average", "carry") for merge in ("trained", "weighted")]
# By workers: settings of AB, and the optimizer.
CASES: dict[int, dict[str, tuple[dict[str, Any], str]]] = {
    workers: {str(size): ({"group_size": size}, "adamw") for own, size in LAYOUTS if own == workers}
    for workers in {workers for workers, _ in LAYOUTS}
}
CASES[4]["rounded wire"] = {"group_size": 2, "wire": "bf16", "moments": "average"}, "adamw"
CASES[3] |= {
    f"{merge}, {moments}": (
        {"group_size": 2, "merge": merge, "moments": moments},
        "adamw" if merge == "trained" else "sgd",
    )
    for merge, moments in MERGES
}


def trajectories(rank: int, cases: dict[str, Any]) -> dict[str, list[tuple[str, bool, int, int, str]]]:
    return {name: trajectory(rank, *case) for name, case in cases.items()}


@functools.cache
def traces_of(workers: int) -> list[dict[str, list[tuple[str, bool, int, int, str]]]]:
    """Every case of so many workers, one after the other in the same ones."""
    return gang.run(trajectories, workers, CASES[workers])


_LAYOUTS = [(workers, case) for workers, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(
    ("workers", "case"),
    [pytest.param(*each, marks=[] if each[0] <= 2 else pytest.mark.slow) for each in _LAYOUTS],
)
def test_workers_agree_in_every_layout_with_every_merge_and_wire(workers: int, case: str) -> None:
    assert_agreement([worker[case] for worker in traces_of(workers)])


def test_groups_do_train_apart() -> None:
    traces = [worker["2"] for worker in gang.run(trajectories, 4, {"2": CASES[4]["2"]})]
    inside = [i for i, (phase, *_) in enumerate(traces[0]) if phase == "groups"]
    assert inside
    for i in inside[1:]:
        if traces[0][i - 1][0] == "groups":
            assert traces[0][i][2] == traces[1][i][2] and traces[2][i][2] == traces[3][i][2]
            assert traces[0][i][2] != traces[2][i][2]


def merged_mean(rank: int, merge: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The group's own model one step before the merge, and what `merged()` makes of it."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    replica = thinwire.attach(model, optimizer, ab(group_size=2, merge=merge))
    for step in range(8):
        train_step(replica, optimizer, step, rank)
    assert replica.phase == "groups"
    own = {k: t.clone() for k, t in replica.state_dict().items()}
    with replica.merged():
        lent = {k: t.clone() for k, t in replica.state_dict().items()}
    assert all(torch.equal(t, own[k]) for k, t in replica.state_dict().items())
    return own, lent


@pytest.mark.parametrize(("merge", "weights"), [("mean", (2 / 3, 1 / 3)), ("trained", None)])
def test_a_merge_is_the_weighted_mean_of_copies(merge: str, weights: Any) -> None:
    results = gang.run(merged_mean, 3, merge)
    first, second = results[0][0], results[2][0]
    for key, lent in results[1][1].items():
        if lent.is_floating_point():
            a, b = (2 / 3, 1 / 3) if weights or "_" not in key else (1.0, 0.0) if key.endswith("_a") else (0.0, 1.0)
            a, b = (2 / 3, 1 / 3) if "running" in key else (a, b)
            torch.testing.assert_close(lent, a * first[key] + b * second[key], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(results[0][1][k], results[2][1][k]) for k in results[0][1])


def flipped_signs(rank: int) -> tuple[int, float]:
    model = small_model()
    optimizer = adamw(model)
    if rank == 1:
        honest = ranks.matrix.decompose_if_smaller
        ranks.matrix.decompose_if_smaller = lambda matrix, cutoff: _flip(
            honest(matrix, 0.3 if matrix.shape[1] < 20 else cutoff)
        )
    replica = thinwire.attach(model, optimizer, ab(warmup=2))
    for step in range(2):
        train_step(replica, optimizer, step, rank)
    assert replica.phase == "groups"
    return values(replica), replica.traffic.by_purpose["decomposition"]["slow_bytes"] if rank == 0 else 0


def _flip(factors: Any) -> Any:
    return factors._replace(a=-factors.a, b=-factors.b)


def test_workers_whose_decompositions_differ_take_rank_zeros() -> None:
    results = gang.run(flipped_signs, 2, fresh=True)
    assert results[0][0] == results[1][0]
    assert results[0][1] > 0


# Invariant 8: an exported model is the finished one.


class Attention(nn.Module):
    """Attention, a transposed convolution and a plain layer, so that every kind of export is used."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 48, batch_first=True, dropout=0.0)
        self.up = nn.ConvTranspose1d(16, 24, 3)
        self.leave = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.block(self.enter(x)).transpose(1, 2))
        return self.leave(hidden.mean(dim=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        ab(keep_first=False, keep_last=False, cutoff=0.4, group_size=None),
        thinwire.OIALR(total_steps=24, factor_at=2, redecompose=2, cutoff=0.4, layer_fraction=1.0, keep_last=False),
    ],
    ids=["ab-paper", "oialr"],
)
def test_the_exported_model_is_the_finished_one(config: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(6, 7, 12)
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, config)
    for _ in range(9):
        loss = F.cross_entropy(replica(x), torch.arange(6) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small = replica.eval().finish(cutoff=0.5)
    assert not any("thinwire" in type(m).__module__ for m in small.modules())
    folder = export.write(small, tmp_path / "exported", example_input=x)
    torch.save({"x": x, "y": small(x).detach(), "y1": small(x[:1]).detach()}, tmp_path / "expected.pt")
    count = sum(p.numel() for p in small.parameters())
    assert count < replica.describe()["parameters_full"] and count == replica.describe()["parameters"]
    script = tmp_path / "stranger.py"
    script.write_text(STRANGER)
    done = subprocess.run(
        [sys.executable, script, folder, tmp_path / "expected.pt", str(count)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


STRANGER = """
import sys
sys.modules["thinwire"] = None  # importing it is an error
import torch
from torch import nn
folder, expected, count = sys.argv[1], torch.load(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, folder)
from load import load

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(12, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 48, batch_first=True, dropout=0.0)
        self.up = nn.ConvTranspose1d(16, 24, 3)
        self.leave = nn.Linear(24, 5)
    def forward(self, x):
        hidden = self.up(self.block(self.enter(x)).transpose(1, 2))
        return self.leave(hidden.mean(dim=2))

model = load(Attention(), folder).eval()
assert sum(p.numel() for p in model.parameters()) == count
torch.testing.assert_close(model(expected["x"]), expected["y"], rtol=1e-5, atol=1e-5)
program = torch.export.load(folder + "/program.pt2").module()
torch.testing.assert_close(program(expected["x"]), expected["y"], rtol=1e-5, atol=1e-5)
torch.testing.assert_close(program(expected["x"][:3]), expected["y"][:3], rtol=1e-5, atol=1e-5)
"""


# Invariant 5: what the ledger counts is what crosses.


def loopback_bytes() -> int:
    """Bytes that the kernel sent over its loopback interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def wide_model() -> nn.Module:
    """A model big enough for its own bytes to outweigh everything around them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 600), nn.BatchNorm1d(600), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 5))


def counted_and_sent(
    kernel_bytes: Callable[[], int], rank: int, config: Any, options: dict[str, Any] | None
) -> tuple[int, int]:
    model = wide_model()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, config, ddp=options)
    replica.wire.barrier("before")
    counted, sent = replica.traffic.slow_bytes, kernel_bytes()
    for step in range(24):
        x, y = batch(step, rank)
        loss = F.cross_entropy(replica(x.flatten(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    replica.wire.barrier("after")
    return replica.traffic.slow_bytes - counted, kernel_bytes() - sent


WIRES = {
    "fp32": (thinwire.AllReduce(), None),
    "small buckets": (thinwire.AllReduce(), {"bucket_cap_mb": 0.2}),
    "unused": (thinwire.AllReduce(), {"find_unused_parameters": True}),
    "bf16": (thinwire.AllReduce(wire="bf16"), None),
    "ab-paper": (ab(cutoff=0.5), None),
    "ab without groups": (ab(cutoff=0.5, group_size="world"), None),
}


def every_wire(rank: int, kernel_bytes: Callable[[], int]) -> dict[str, tuple[int, int]]:
    return {name: counted_and_sent(kernel_bytes, rank, *options) for name, options in WIRES.items()}


@pytest.fixture(scope="module")
def over_sockets() -> list[dict[str, tuple[int, int]]]:
    return gang.run(every_wire, 2, socket_bytes)


@pytest.fixture(scope="module")
def over_loopback() -> list[dict[str, tuple[int, int]]]:
    """On one host of their own: this machine's loopback may carry what other programs send."""
    with hosts.Hosts(name=f"twinv{os.getpid()}") as lab:
        return gang.run(every_wire, 2, loopback_bytes, hosts=lab.hosts[:1])


@pytest.mark.slow
@needs_counts
@pytest.mark.parametrize("name", WIRES)
def test_the_ledger_counts_what_sockets_send(name: str, over_sockets: list[dict[str, tuple[int, int]]]) -> None:
    for counted, sent in (worker[name] for worker in over_sockets):
        # Messages have headers of gloo's own.
        assert counted <= sent <= 1.03 * counted + 50_000


@pytest.mark.slow
@needs.root(hosts.why_not())
@pytest.mark.parametrize("name", WIRES)
def test_the_ledger_counts_what_the_kernel_sends(name: str, over_loopback: list[dict[str, tuple[int, int]]]) -> None:
    results = [worker[name] for worker in over_loopback]
    counted = sum(mine for mine, _ in results)
    sent = max(kernel for _, kernel in results)
    # The kernel counts headers and acknowledgements too.
    assert counted <= sent <= 1.03 * counted + 100_000


def accumulated(rank: int) -> dict[str, int]:
    """Gradient bytes of three micro-batches with one exchange, with three, and of a forward pass alone."""
    found = {}
    for name, quiet in (("no_sync", 2), ("every", 0)):
        model = small_model()
        optimizer = adamw(model)
        replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
        for i in range(3):
            with replica.no_sync() if i < quiet else contextlib.nullcontext():
                x, y = batch(i, rank)
                F.cross_entropy(replica(x), y).backward()
        optimizer.step()
        replica(x)
        found[name] = int(replica.traffic.by_purpose["gradients"]["slow_bytes"])
    return found


def test_only_backward_passes_that_exchange_are_counted() -> None:
    size = 4 * sum(p.numel() for p in small_model().parameters())
    assert gang.run(accumulated, 2) == [{"no_sync": size, "every": 3 * size}] * 2


# What else groups must not pull apart.


class WithTables(nn.Module):
    """A float constant, an integer constant, and BatchNorm whose statistics do differ."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()
        self.register_buffer("angles", torch.linspace(0, 1, 999))
        self.register_buffer("order", torch.arange(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def constants_and_scalars(rank: int) -> dict[str, Any]:
    model = here(WithTables())
    optimizer = torch.optim.NAdam(model.net.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, ab(moments="average"))
    for step in range(9):
        train_step(replica, optimizer, step, rank)
        if step == 7 and rank == 1:
            optimizer.state[model.net[0].bias]["mu_product"].mul_(0.5)  # as if a step had been skipped here
    assert replica.phase == "rebound"
    same = torch.equal(model.angles.cpu(), torch.linspace(0, 1, 999)) and torch.equal(
        model.order.cpu(), torch.arange(7)
    )
    known = model.net[0].bias in optimizer.state, model.net[9].bias in optimizer.state
    # DDP refuses a SyncBatchNorm on a CPU, so only a group of one can be wrapped here.
    norm = nn.SyncBatchNorm(5)
    Replicated(norm, replica.wire).wrap((rank,))
    alone = torch.distributed.get_world_size(norm.process_group) == 1
    return {"same": same, "known": known, "alone": alone, "bits": (values(replica), optimizer_values(optimizer))}


def test_constants_scalars_and_synced_norms_at_a_merge() -> None:
    results = gang.run(constants_and_scalars, 3)
    assert results[0]["bits"] == results[1]["bits"] == results[2]["bits"]
    for found in results:
        assert found["same"], "a merge changed a constant"
        assert found["known"] == (False, True)  # unequal scalars start again, the others stay
        assert found["alone"], "a SyncBatchNorm talks beyond its group"
