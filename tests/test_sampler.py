"""Samples count once, whatever becomes of groups."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import gang
import small
import thinwire
from launchers import Launchers, held
from test_faults import TIMEOUT, _die
from thinwire import AllReduce, ConfigError, ElasticSampler, Faults, LocalSGD
from thinwire.checkpoint.dealing import Came, Deal


class Market:
    """Workers that train, average, are lost and come, and what really is in their models."""

    def __init__(self, seed: int) -> None:
        self.chance, self.names = random.Random(seed), 0
        self.deals: dict[str, Deal] = {}
        self.held: dict[str, list[int]] = {}
        """By process: tickets in its model since the last average."""
        self.counted: Counter[int] = Counter()
        first = [self._new_name() for _ in range(4)]
        self.deals = {name: Deal(rank, len(first)) for rank, name in enumerate(first)}
        self.held = {name: [] for name in first}

    def _new_name(self) -> str:
        self.names += 1
        return f"p{self.names}"

    def train(self) -> None:
        for name, deal in self.deals.items():
            count = self.chance.choice((0, 2, 2, 2, 4))
            self.held[name] += deal.own(deal.drawn, deal.drawn + count).tolist()
            deal.drawn += count
            deal.trained = deal.drawn

    def average(self, seen_by: int | None = None) -> None:
        """All of them, of whom only some may learn of it before groups change."""
        done = torch.tensor([deal.votes(drawn=False) for deal in self.deals.values()]).amax(0).tolist()
        for deal in list(self.deals.values())[:seen_by]:
            deal.commit(done)
        for tickets in self.held.values():
            self.counted.update(tickets)
            tickets.clear()

    def change(self, lose: int, come: int) -> None:
        before = list(self.deals)
        keep = [*before[:1], *before[1 + lose :]]  # the first has seen every average
        came = {name: Came(*json.loads(json.dumps(self.deals[name].says))) for name in keep}
        members = [*keep, *(self._new_name() for _ in range(come))]
        self.chance.shuffle(members)
        for name in keep:
            self.deals[name].again(before, came, members.index(name), len(members))
        packed = json.loads(json.dumps(self.deals[keep[0]].read()))
        for rank, name in enumerate(members):
            if name not in self.deals:
                self.deals[name] = Deal(rank, len(members))
                self.deals[name].fill(packed, rank, len(members))
        self.deals = {name: self.deals[name] for name in members}
        self.held = {name: self.held.get(name, []) for name in members}

    def resume(self, workers: int) -> None:
        """From a save, with other workers: the first groups' models go on."""
        rows = [(deal.done[deal.rank], deal.trained) for deal in self.deals.values()]
        saved = json.loads(json.dumps(next(iter(self.deals.values())).saved(rows, list(self.deals))))
        old, members = list(self.deals), [self._new_name() for _ in range(workers)]
        heirs = dict(enumerate(members[: len(old)]))
        self.deals = {name: Deal(0, 1) for name in members}
        for rank, deal in enumerate(self.deals.values()):
            deal.resume(saved, heirs, rank, workers)
        self.held = dict(zip(members, [self.held[name] for name in old] + [[] for _ in members], strict=False))

    def check(self) -> None:
        views = [
            (d.next, d.open.tolist(), d.done, {p: t.tolist() for p, t in d.pending.items()})
            for d in self.deals.values()
        ]
        assert all(view == views[0] for view in views)
        assert not self.counted or max(self.counted.values()) == 1
        assert len(self.counted) == next(iter(self.deals.values())).counted


def test_each_ticket_counts_once_whatever_happens() -> None:
    for seed in range(50):
        a_schedule(seed)


def a_schedule(seed: int) -> None:
    market = Market(seed)
    for _ in range(30):
        market.train()
        event = market.chance.random()
        if event < 0.5:
            market.average()
        elif event < 0.6:
            market.average(seen_by=1)
            market.change(1, 1)
        elif event < 0.9:
            lose = market.chance.randrange(min(3, len(market.deals)))
            market.change(lose, market.chance.randrange(3) if len(market.deals) - lose < 6 else 0)
        else:
            market.resume(market.chance.randrange(1, 6))
        market.check()
    market.average()
    market.check()
    market.change(0, 0)
    for name, deal in market.deals.items():  # what is left over comes before anything new: nothing is forgotten
        deal.drawn = deal.trained = -(-len(deal.open) // deal.size)
        market.held[name] += deal.own(0, deal.drawn).tolist()
    market.average()
    assert set(range(next(iter(market.deals.values())).next)) <= market.counted.keys()


COUNT, BATCH = 400, 4
SHAPE = small.batch(0, 0)[0].shape[1:]
DATA = TensorDataset(torch.randn(COUNT, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.arange(COUNT))


def walked(
    group: int,
    worker: int,
    folder: str,
    config: Any,
    deaths: dict[int, tuple[str, int]],
    holds: tuple[int, ...],
    steps: int,
) -> Any:
    """Train on dealt samples; note in a file which of them an average contains."""
    torch.set_num_threads(1)
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, config, faults=Faults(timeout=TIMEOUT))
    sampler = ElasticSampler(DATA, replica, batch_size=BATCH, seed=3)
    batches = sampler.batches(DataLoader(DATA, batch_sampler=sampler))
    where, when = deaths.get(group, ("", -1))
    if replica.step:
        when = -1
    since: list[int] = []
    notes = Path(folder, f"{group}-{worker}.jsonl")

    def note() -> None:
        nonlocal since
        with notes.open("a") as lines:
            lines.write(json.dumps(since) + "\n")
        since = []

    for step in replica.steps(steps):
        if step == when and worker == 0:
            _die(where, replica)
        if step in holds:
            held(replica)
        x, numbers = next(batches)
        commits, before = replica._state.data.commits, replica.step
        loss = F.cross_entropy(replica(x), numbers % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if replica.step > before:
            since += numbers.tolist()
        if replica._state.data.commits > commits:
            note()
    bits = small.model_bits(replica.finish())
    note()
    return {"bits": bits, "counted": sampler.counted, "events": replica.events}


def counts(folder: Path) -> Counter[int]:
    """How often each sample was in an average."""
    return Counter(
        n for file in folder.glob("*.jsonl") for line in file.read_text().splitlines() for n in json.loads(line)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "where", "when"),
    [
        (LocalSGD(every=4), "forward", 9),
        (LocalSGD(every=4), "backward", 10),
        (LocalSGD(every=4), "vote", 11),
        (AllReduce(), "backward", 9),
        (AllReduce(wire="int8"), "vote", 9),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_samples_of_a_lost_group_are_the_others(tmp_path: Path, config: Any, where: str, when: int) -> None:
    """One epoch: three groups, one of which is lost; the others do its part, and every sample counts once."""
    launchers = Launchers(walked, 3, 1, str(tmp_path), config, {1: (where, when)}, (), 45)
    found = one_model_of(launchers.collect(timeout=100), 2)
    assert found[0]["counted"] == found[1]["counted"] >= COUNT - 3 * BATCH
    seen = counts(tmp_path)
    assert seen.total() == found[0]["counted"]
    assert max(seen.values()) == 1 or seen.total() > COUNT


@pytest.mark.slow
def test_a_group_that_comes_back_has_its_share_again(tmp_path: Path) -> None:
    launchers = Launchers(walked, 3, 1, str(tmp_path), LocalSGD(every=4), {2: ("backward", 6)}, (14,), 33)
    for group in (0, 1):
        launchers.wait_for(f"held/{group}")
    launchers.restart(2)
    found = one_model_of(launchers.collect(timeout=100), 3)
    assert [(event["lost"], event["came"]) for event in found[0]["events"]] == [([2], []), ([], [2])]
    seen = counts(tmp_path)
    assert len({value["counted"] for value in found}) == 1
    assert seen.total() == found[0]["counted"] and max(seen.values()) == 1


def one_model_of(found: dict[tuple[int, int], Any], count: int) -> list[Any]:
    values = list(found.values())
    assert len(values) == count and all(isinstance(value, dict) for value in values), values
    assert len({value["bits"] for value in values}) == 1
    return values


def epochs(rank: int, folder: str, saves: bool) -> tuple[list[int], int]:
    """An epoch of this worker's samples, saved in its middle between two averages."""
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4, group_size=1))
    sampler = ElasticSampler(DATA, replica, batch_size=BATCH)
    if not saves:
        replica.load(folder)
    batches, seen = sampler.batches(DataLoader(DATA, batch_sampler=sampler)), []
    total = COUNT // BATCH // replica.topology.world_size
    for _ in range(10 if saves else 100):
        if sampler.counted + replica.topology.world_size * BATCH * (replica.step % 4) >= COUNT:
            break
        x, numbers = next(batches)
        seen += numbers.tolist()
        loss = F.cross_entropy(replica(x), numbers % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if saves:
        replica.save(folder)
    replica.finish()
    return seen, total


@pytest.mark.parametrize("workers", [4, 2])
def test_an_epoch_goes_on_from_a_save_with_other_workers(tmp_path: Path, workers: int) -> None:
    first = [seen for seen, _ in gang.run(epochs, 4, str(tmp_path / "save"), True)]
    rest = [seen for seen, _ in gang.run(epochs, workers, str(tmp_path / "save"), False)]
    lost = {n for seen in first[workers:] for n in seen[32:]}  # models that nobody goes on from, since their average
    assert lost or workers == 4
    kept = Counter(n for seen in first for n in seen)
    kept.subtract(lost)
    total = kept + Counter(n for seen in rest for n in seen)
    assert set(total.values()) == {1} and len(total) >= COUNT - workers * BATCH


def test_a_loader_with_processes_may_be_ahead() -> None:
    replica = alone()
    sampler = ElasticSampler(DATA, replica, batch_size=BATCH, seed=5)
    batches = sampler.batches(DataLoader(DATA, batch_sampler=sampler, num_workers=2, prefetch_factor=4))
    seen = [n for _ in range(6) for n in next(batches)[1].tolist()]
    sampler._deal.trained = sampler._deal.drawn
    sampler._deal.again(["0"], {"0": sampler._deal.says}, 0, 1)
    seen += [n for _ in range(6) for n in next(batches)[1].tolist()]
    assert seen == [sampler.sample(ticket) for ticket in range(12 * BATCH)]
    assert (len(sampler), sampler.epoch) == (100, 0.0)
    batches.close()


def alone() -> Any:
    model = small.net()
    return thinwire.attach(model, AdamW(model.parameters(), 3e-3), AllReduce())


def test_what_cannot_be_dealt_is_refused() -> None:
    replica = alone()
    with pytest.raises(ConfigError, match="has no length"):
        ElasticSampler(iter(()), replica, batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`batch_size`=0 of ElasticSampler must be a whole number from 1 on"):
        ElasticSampler(DATA, replica, batch_size=0)
    with pytest.raises(ConfigError, match="takes a replica, not Conv2d"):
        ElasticSampler(DATA, torch.nn.Conv2d(1, 1, 1), batch_size=1)  # type: ignore[arg-type]
    ElasticSampler(DATA, replica, batch_size=1)
    with pytest.raises(ConfigError, match="has an ElasticSampler"):
        ElasticSampler(DATA, replica, batch_size=1)
