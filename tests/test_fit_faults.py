"""`faults=` wherever a run begins: a group is killed, and the others go on."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import gang
import needs
import small
import thinwire
from launchers import TIMEOUT, Launchers, free_port, held, note, start_store
from patience import until
from thinwire import AB, AllReduce, ConfigError, Faults, LocalSGD
from thinwire.cli import main
from thinwire.integrations.loop import refuse_faults
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
def test_fit_goes_on_without_a_group_of_two_workers(tmp_path: Path) -> None:
    summary = finished(Launchers(fitted, 2, 2, "localsgd", str(tmp_path), {0: 13}).collect(), 2, tmp_path)
    assert (summary["world_size"], summary["steps"]) == (2, STEPS)
    records(tmp_path, 13)


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


@pytest.mark.slow
def test_no_group_joins_a_loop_that_counts_its_own_batches() -> None:
    launchers = Launchers(late, 2, 1)
    launchers.restart(1)
    stranger = launchers.results[1, 0]
    until(stranger.poll, "the refusal")
    assert "ConfigError: group 1 cannot join the run on this store, which is under way" in stranger.recv()
    launchers.store.set("/refused", "")
    assert [event["lost"] for event in launchers.collect(frozen=[1])[0, 0]] == [[1]]


# The command.


def commands(groups: int, out: Path, port: int, *words: str) -> list[subprocess.Popen[str]]:
    """`thinwire run` as each group's only process."""
    silence = f"heartbeat_timeout={min(TIMEOUT, gang.patient(3.0)):.1f}"
    line = [*(sys.executable, "-m", "thinwire", "run", "digits", "--method", "localsgd", "--out", str(out), *words)]
    line += ["--faults", f"timeout={TIMEOUT:g}", "--faults", silence, "--quiet"]
    own = {"THINWIRE_STORE": f"127.0.0.1:{port}", "THINWIRE_GROUPS": str(groups), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(line, env=os.environ | own | {"THINWIRE_GROUP": str(group)}, stderr=subprocess.PIPE, text=True)
        for group in range(groups)
    ]


def wait_for_step(out: Path, step: int) -> None:
    until(lambda: (out / "records.jsonl").is_file() and f'"step": {step},' in (out / "records.jsonl").read_text(), "it")


@pytest.mark.slow
def test_the_command_goes_on_without_the_group_of_rank_0(tmp_path: Path) -> None:
    server, out = start_store(port := free_port()), tmp_path / "run"
    running = commands(3, out, port, "--steps", "400", "--eval-every", "100", "--save-every", "100")
    try:
        wait_for_step(out, 60)
        running[0].kill()
        said = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
        server.kill()
    assert [process.returncode for process in running] == [-signal.SIGKILL, 0, 0], said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 400 and (out / "report.html").is_file() and (out / "model").is_dir()
    assert "group 0 lost" in said[1]


@pytest.mark.slow
def test_a_signal_to_one_group_stops_the_command_of_all(tmp_path: Path) -> None:
    server, out = start_store(port := free_port()), tmp_path / "run"
    running = commands(2, out, port, "--steps", "2000")
    try:
        wait_for_step(out, 60)
        running[1].terminate()
        said = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
        server.kill()
    assert [process.returncode for process in running] == [75, 75], said
    assert all("stopped by SIGTERM and saved after step" in each for each in said)
    assert len(list((out / "checkpoint").iterdir())) == 1


# What is refused, before anything is done.

PLACE = {"THINWIRE_STORE": "127.0.0.1:1", "THINWIRE_GROUP": "1", "THINWIRE_GROUPS": "3"}


@pytest.mark.parametrize(
    ("words", "place", "said"),
    [
        ([], {}, "faults=… needs THINWIRE_STORE, THINWIRE_GROUP, THINWIRE_GROUPS in the environment"),
        (["--workers", "3"], PLACE, "`--workers 3` with `--faults`: one launcher would end all of its workers"),
        (["--group-size", "1"], PLACE, "`--group-size 1` with `--faults`: there each launcher's workers are a group"),
        (["--dry-run"], PLACE, "`--dry-run` takes its step without other groups: leave `--faults` out"),
        (["--stability", "5"], PLACE, "`stability`=5 with faults=… is not supported: rank 0 alone has the bases"),
        (["--faults", "tmeout=3"], PLACE, "unknown field of Faults 'tmeout', choose from: heartbeat_timeout, joins,"),
        (["--faults", "timeout"], PLACE, "`--faults timeout` must be NAME=VALUE"),
        (["--faults", "timeout=0"], PLACE, "`timeout`=0.0 must be a number of seconds from 1 on, such as 60"),
    ],
)
def test_the_command_refuses(words: list[str], place: dict[str, str], said: str, tmp_path: Path) -> None:
    line = ["run", "digits", "--method", "localsgd", "--out", str(tmp_path / "run"), *words, "--faults"]
    found = CliRunner().invoke(main, line, env=dict.fromkeys(PLACE) | place)
    assert found.exit_code == 2 and said in found.output
    assert not (tmp_path / "run").exists()


def test_fit_refuses_patience(tmp_path: Path) -> None:
    recipe = named("digits", steps=STEPS).replace(patience=2)
    with pytest.raises(ConfigError, match="`patience`=2 with faults=… is not supported: a group that joins does not"):
        fit(recipe, LocalSGD(), out=tmp_path / "run", faults=Faults())


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"joins": 1}, "`joins`=1 must be True or False"), ({"joins": False, "skip_after": 1}, "`skip_after`=1 with")],
)
def test_faults_refuses(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Faults(**fields)


def test_loops_that_count_their_batches_refuse_groups_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"with Trainer: a group that joins would begin at the loop's first batch"):
        refuse_faults(Faults(), "Trainer")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a launcher has set RANK=0 and WORLD_SIZE=2, by which Accelerate begins"):
        refuse_faults(FIXED, "Accelerate")


class ReachedError(Exception):
    """With what `attach` was called."""


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Any:
    def attach(model: Any, optimizer: Any, config: Any, *, faults: Any) -> Any:
        raise ReachedError(faults)

    def within(module: str) -> Any:
        monkeypatch.setattr(f"thinwire.{module}.attach", attach)
        return pytest.raises(ReachedError)

    return within


def test_faults_reach_attach_by_fit(reached: Any, tmp_path: Path) -> None:
    with reached("train.run") as caught:
        fit(named("digits", steps=STEPS), LocalSGD(), out=tmp_path / "run", faults=FIXED)
    assert caught.value.args == (FIXED,)


def test_faults_reach_attach_by_the_command(reached: Any, tmp_path: Path) -> None:
    line = ["run", "digits", "--method", "localsgd", "--out", str(tmp_path / "run"), "--faults", "timeout=30"]
    with reached("train.run") as caught:
        CliRunner().invoke(main, [*line, "--faults", "joins=false"], env=PLACE, catch_exceptions=False)
    assert caught.value.args == (FIXED,)


def test_trainer_refuses_and_hands_on(reached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.package("transformers")
    from transformers.trainer_utils import SaveStrategy

    from thinwire.integrations import transformers

    arguments = SimpleNamespace(save_strategy=SaveStrategy.STEPS, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="`save_strategy`='steps' with faults=… is not supported: Trainer takes each"):
        transformers.refuse_with_faults(arguments, FIXED)
    arguments.save_strategy = SaveStrategy.NO
    with pytest.raises(ConfigError, match="`gradient_accumulation_steps`=2 with faults=… is not supported: Trainer"):
        transformers.refuse_with_faults(arguments, FIXED)
    with pytest.raises(ConfigError, match="`train_dataset` is a generator without a length"):
        transformers.share_of_group(number for number in range(3))
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert list(transformers.share_of_group(list(range(11)))) == [1, 4, 7]
    trainer: Any = SimpleNamespace(replica=None, model=small.mlp(), optimizer=None, config=LocalSGD(), length=1)
    trainer.args, trainer.faults = SimpleNamespace(load_best_model_at_end=False), FIXED
    with pytest.raises(ConfigError, match="`resume_from_checkpoint`='here' with faults=… is not supported"):
        transformers.ThinwireTrainer._prepare_for_training(trainer, 1, None, "here")
    with reached("integrations.transformers") as caught:
        transformers.ThinwireTrainer._wrap_model(trainer, trainer.model)
    assert caught.value.args == (FIXED,)


def test_accelerate_refuses_and_hands_on(reached: Any) -> None:
    needs.package("accelerate")
    from thinwire.integrations import accelerate

    accelerator: Any = SimpleNamespace(gradient_accumulation_steps=2, device="cpu", _models=[], mixed_precision="no")
    accelerator.distributed_type = SimpleNamespace(value="NO")
    with pytest.raises(ConfigError, match="`gradient_accumulation_steps`=2 with faults=… is not supported: Accelerate"):
        accelerate.refuse_with_faults(accelerator, FIXED)
    with pytest.raises(ConfigError, match=r"accelerator\.save_state\(\) and load_state\(\) with faults=… are not"):
        accelerate._refuse_states(FIXED)
    accelerator.gradient_accumulation_steps, model = 1, small.mlp()
    with (
        reached("integrations.accelerate") as caught,
        accelerate.attached(accelerator, model, small.sgd(model), LocalSGD(), faults=FIXED),
    ):
        pass
    assert caught.value.args == (FIXED,)


@pytest.mark.slow  # Lightning is among its tools
def test_lightning_refuses_and_hands_on(reached: Any, tmp_path: Path) -> None:
    needs.package("lightning")
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn

    from thinwire.integrations.lightning import ThinwireStrategy

    warnings.simplefilter("ignore")
    with pytest.raises(ConfigError, match="`devices` and `num_nodes` make 2 workers: with faults=… each group is one"):
        lightning_trainer(tmp_path, FIXED, devices=2)
    with pytest.raises(ConfigError, match="with Lightning: a group that joins would begin"):
        lightning_trainer(tmp_path, Faults())
    strategy: Any = ThinwireStrategy(LocalSGD(), faults=FIXED)
    strategy._lightning_module, strategy._optimizers = SimpleNamespace(automatic_optimization=True), []
    strategy._lightning_module.named_modules = list
    trainer: Any = SimpleNamespace(precision="32-true", lightning_module=strategy._lightning_module)
    trainer.state, trainer.checkpoint_callbacks = SimpleNamespace(fn=TrainerFn.FITTING), [None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPStrategy, "setup", lambda self, trainer: None)
        with pytest.raises(ConfigError, match="checkpoints with faults=… are not supported: Lightning takes"):
            strategy.setup(trainer)
        trainer.checkpoint_callbacks = []
        with reached("integrations.lightning") as caught:
            strategy.setup(trainer)
    assert caught.value.args == (FIXED,)
