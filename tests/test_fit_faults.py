"""`faults=` wherever a run begins: a group is killed, and the others go on."""

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import needs
import small
import thinwire
from launchers import TIMEOUT, Launchers, held, note
from patience import until
from thinwire import AB, AllReduce, Faults, LocalSGD
from thinwire.recipes import named
from thinwire.train import fit

STEPS = 40
WAYS: dict[str, Any] = {
    "allreduce": AllReduce(),
    "localsgd": LocalSGD(every=4, warmup=3),
    "ab": AB(total_steps=STEPS, warmup=5, every=4, factor_at=16, redecompose=2, cutoff=0.6),
}


def fitted(
    group: int, worker: int, name: str, out: str, dies: dict[int, int], hold: int = -1, resume: bool = False
) -> Any:
    """`fit`, in which groups die before a step, or wait at one until all are in."""
    torch.set_num_threads(1)
    from thinwire.train import loop

    real = loop.train_step

    def train_step(run: Any, batch: Any) -> Any:
        step = run.replica.step
        if step == 0:
            note(run.replica, "training")
        if dies.get(group) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == hold:
            held(run.replica)
        return real(run, batch)

    loop.train_step = train_step
    recipe = named("digits", steps=STEPS, eval_every=10, batch_size=60)
    return fit(recipe, WAYS[name], out=out, save_every=10, faults=Faults(timeout=TIMEOUT), resume=resume)


def finished(found: dict[tuple[int, int], Any], count: int, out: Path) -> dict[str, Any]:
    for slot, value in found.items():
        assert isinstance(value, dict), f"{slot}: {value}"
    assert len(found) == count
    summary = json.loads((out / "summary.json").read_text())
    assert {value["accuracy"] for value in found.values()} == {summary["accuracy"]}
    return summary


def records(out: Path, died: int, every: int = 4) -> list[dict[str, Any]]:
    """The lines; where rank 0 `died`, those of its steps until others noticed are missing, at their next average."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == sorted(set(steps)) and set(range(1, STEPS + 1)) - set(steps) <= {*range(died + 1, died + every)}
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dies"), [("localsgd", {1: 13}), ("allreduce", {0: 13}), ("ab", {0: 22})])
def test_fit_goes_on_without_a_group(name: str, dies: dict[int, int], tmp_path: Path) -> None:
    summary = finished(Launchers(fitted, 3, 1, name, str(tmp_path), dies).collect(), 2, tmp_path)
    assert summary["steps"] == STEPS and summary["accuracy"] > 0.5
    assert [event["lost"] for event in summary["events"] if event.get("event") == "groups"] == [list(dies)]
    lines = records(tmp_path, dies.get(0, STEPS))
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [10, 20, 30, 40, 40]
    assert [line["event"] for line in lines if line["kind"] == "event"] == ["groups"]
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-000020", "step-000030"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["localsgd", "ab"])
def test_a_group_that_is_started_again_joins_fit(name: str, tmp_path: Path) -> None:
    """That of rank 0, which it becomes again."""
    launchers = Launchers(fitted, 3, 1, name, str(tmp_path), {0: 13}, 24)
    for group in (1, 2):
        launchers.wait_for(f"held/{group}")
    launchers.restart(0)
    launchers.args = (*launchers.args[:2], {}, -1)
    summary = finished(launchers.collect(), 3, tmp_path)
    assert summary["world_size"] == 3
    assert name != "ab" or summary["ecr"]["full"] > 0  # of steps for which today's rank 0 was not there
    lines = records(tmp_path, 13)
    assert [line["kind"] for line in lines].count("start") == 1
    assert [(line["lost"], line["came"]) for line in lines if line["kind"] == "event"] == [([0], []), ([], [0])]


@pytest.mark.slow
def test_fit_is_resumed_when_all_groups_have_died(tmp_path: Path) -> None:
    whole = finished(Launchers(fitted, 2, 1, "ab", str(tmp_path / "whole"), {}).collect(), 2, tmp_path / "whole")
    launchers = Launchers(fitted, 2, 1, "ab", str(tmp_path / "broken"), {0: 25, 1: 25})
    ended = [process for own in launchers.processes.values() for process in own]
    until(lambda: all(process.exitcode is not None for process in ended), "the end of all groups")
    launchers.args = (*launchers.args[:2], {}, -1, True)
    for group in range(2):
        launchers.start(group)
    summary = finished(launchers.collect(), 2, tmp_path / "broken")
    assert {name: summary[name] for name in ("loss", "accuracy", "ranks")} == {
        name: whole[name] for name in ("loss", "accuracy", "ranks")
    }
    kinds = [line["kind"] for line in records(tmp_path / "broken", STEPS)]
    assert (kinds.count("start"), kinds.count("resume")) == (2, 1)


# Other people's loops: each group is one process, started without torchrun.


def alone() -> None:
    """In a worker: as `python train.py` with THINWIRE_GROUP."""
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    warnings.simplefilter("ignore")


def die_at(replica: Any, dies: dict[int, int], group: int) -> None:
    if dies.get(group) == replica.step:
        os.kill(os.getpid(), signal.SIGKILL)


def by_trainer(group: int, worker: int, name: str, dies: dict[int, int], folder: str) -> Any:
    alone()
    from transformers import TrainerCallback, TrainingArguments

    from test_trainer import gpt, words
    from thinwire.integrations.transformers import ThinwireTrainer

    class Dies(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            die_at(trainer.replica, dies, group)

    settings: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 5e-3, "use_cpu": True, "report_to": []}
    settings |= {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 10, "disable_tqdm": True}
    arguments = TrainingArguments(f"{folder}/{group}", per_device_train_batch_size=4, **settings)
    data = words()
    trainer = ThinwireTrainer(
        *(gpt(), arguments),
        train_dataset=data,
        eval_dataset=words(32),
        thinwire=WAYS[name],
        faults=FIXED,
        callbacks=[Dies()],
    )
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert losses[-1] < losses[0] and len(trainer.train_dataset) == len(data) // 3
    assert torch.equal(trainer.train_dataset[1]["input_ids"], data[3 + group]["input_ids"])
    return {"bits": small.model_bits(trainer.model), "events": trainer.replica.events, "losses": losses}


def by_accelerate(group: int, worker: int, name: str, dies: dict[int, int], folder: str) -> Any:
    alone()
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attached

    accelerator, model = Accelerator(cpu=True), small.net()
    optimizer = accelerator.prepare(AdamW(model.parameters(), 3e-3))
    with attached(accelerator, model, optimizer, WAYS[name], faults=FIXED) as replica:
        for step in range(STEPS):
            die_at(replica, dies, group)
            x, y = small.batch(replica.data_rank, step)
            with accelerator.accumulate(replica):
                accelerator.backward(F.cross_entropy(replica(x), y))
                accelerator.clip_grad_norm_(replica.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return {"bits": small.model_bits(model), "events": replica.events}


def lightning_trainer(folder: Any, faults: Any, config: Any = None, **settings: Any) -> Any:
    import lightning.pytorch as pl

    from thinwire.integrations.lightning import ThinwireStrategy

    settings = {"devices": 1, "enable_checkpointing": False, "logger": False, "max_steps": STEPS} | settings
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    strategy = ThinwireStrategy(config or LocalSGD(), faults=faults)
    return pl.Trainer(strategy=strategy, accelerator="cpu", default_root_dir=folder, **quiet, **settings)


def by_lightning(group: int, worker: int, name: str, dies: dict[int, int], folder: str) -> Any:
    alone()
    from lightning.pytorch.callbacks import Callback

    from test_lightning import module

    class Dies(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            die_at(trainer.strategy.replica, dies, group)

    x, y = zip(*(small.batch(0, number, 1) for number in range(12 * STEPS)), strict=True)
    data = TensorDataset(torch.cat(x), torch.cat(y))
    model, trainer = module(), lightning_trainer(folder, FIXED, WAYS[name], callbacks=[Dies()])
    trainer.fit(model, DataLoader(data, batch_size=4), DataLoader(data, batch_size=40))
    assert trainer.train_dataloader.sampler.num_replicas == 3 and trainer.train_dataloader.sampler.rank == group
    trainer.validate(model, DataLoader(data, batch_size=40))
    trainer.save_checkpoint(f"{folder}/{group}.ckpt")
    return {"bits": small.model_bits(model.net), "events": trainer.strategy.replica.events}


FIXED = Faults(timeout=TIMEOUT, joins=False)
LOOPS = {"transformers": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning}


@pytest.mark.slow
@pytest.mark.parametrize("library", LOOPS)
@pytest.mark.parametrize(("name", "killed"), [("localsgd", 1), ("allreduce", 0), ("ab", 0)])
def test_loops_of_others_go_on_without_a_group(library: str, name: str, killed: int, tmp_path: Path) -> None:
    needs.package(library)
    found = Launchers(LOOPS[library], 3, 1, name, {killed: 13}, str(tmp_path)).collect()
    for slot, value in found.items():
        assert isinstance(value, dict), f"{slot}: {value}"
    assert sorted(group for group, _ in found) == [group for group in range(3) if group != killed]
    assert len({value["bits"] for value in found.values()}) == 1
    for value in found.values():
        assert [event["lost"] for event in value["events"] if event.get("event") == "groups"] == [[killed]]
    assert len({tuple(value.get("losses", ())) for value in found.values()}) == 1


def late(group: int, worker: int) -> Any:
    """Two groups train; the second is started again."""
    torch.set_num_threads(1)
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4), faults=FIXED)
    note(replica, "training")
    for step in range(8):
        if step == 1 and group == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        small.step(replica, optimizer, group, step)
    while replica._recovery.membership.store.get("refused") is None:
        time.sleep(0.05)
    replica.finish()
    return replica.events


def test_no_group_joins_a_loop_that_counts_its_own_batches() -> None:
    launchers = Launchers(late, 2, 1)
    launchers.restart(1)
    stranger = launchers.results[1, 0]
    until(stranger.poll, "the refusal")
    assert "ConfigError: group 1 cannot join the run on this store, which is under way" in stranger.recv()
    launchers.store.set("/refused", "")
    assert [event["lost"] for event in launchers.collect(frozen=[1])[0, 0]] == [[1]]
