"""Hugging Face's Trainer with Thinwire: the same parameters as by a loop of one's own, through checkpoints too."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
import needs
import small
import thinwire
from thinwire import AB, AllReduce, ConfigError, DiLoCo, LocalSGD

needs.package("transformers")

STEPS = 12
WAYS: dict[str, Any] = {
    "allreduce": AllReduce(),
    "localsgd": LocalSGD(every=3, wire="int4", warmup=3, second_moment="shared", group_size=1),
    "diloco": DiLoCo(every=4, warmup=2, group_size=1),
    "ab": lambda steps: AB(total_steps=steps, warmup=2, every=2, factor_at=0.5, cutoff=0.5, group_size=1),
}


def words(number: int = 192) -> list[dict[str, torch.Tensor]]:
    """Each word is followed by the next one, or by any other."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(number):
        start = torch.randint(16, (1,), generator=generator)
        text = (start + torch.arange(8) + torch.randint(2, (8,), generator=generator)) % 16
        found.append({"input_ids": text, "labels": text})
    return found


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2, **without))


def trainer_of(rank: int, workers: int, config: Any, folder: Path, model: Any = None, **more: Any) -> Any:
    """As under torchrun."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(workers))
    from transformers import TrainingArguments

    from thinwire.integrations.transformers import ThinwireTrainer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 5e-3,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 4,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(str(folder), **(settings | more))
    return ThinwireTrainer(model or gpt(), arguments, train_dataset=words(), eval_dataset=words(32), thinwire=config)


def by_hand(rank: int, workers: int, config: Any, folder: Path) -> str:
    """What a script of one's own would do with the same batches."""
    from thinwire.integrations.transformers import for_length

    trainer = trainer_of(rank, workers, config, folder)
    model, batches = trainer.model, trainer.get_train_dataloader()
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(STEPS, optimizer)
    replica = thinwire.attach(model, optimizer, for_length(config, STEPS))
    done = 0
    for epoch in range(100):
        batches.set_epoch(epoch)
        waiting: list[Any] = []
        for batch in batches:
            waiting.append(batch)
            if len(waiting) < 2:
                continue
            tokens = sum(each["labels"].numel() for each in waiting)  # as Trainer counts them
            for number, each in enumerate(waiting):
                if number == 0:
                    with replica.no_sync():
                        replica(**each, num_items_in_batch=torch.tensor(tokens)).loss.backward()
                else:
                    replica(**each, num_items_in_batch=torch.tensor(tokens)).loss.backward()
            waiting = []
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done == STEPS:
                return small.model_bits(replica.finish())
    raise AssertionError("too few batches")


def compared(rank: int, workers: int, names: list[str], folder: Path) -> dict[str, Any]:
    found = {}
    for name in names:
        trainer = trainer_of(rank, workers, WAYS[name], folder / name, eval_strategy="steps", eval_steps=5)
        trainer.train()
        logged, ranks = trainer.state.log_history, trainer.replica.finished_ranks
        assert {"traffic_vs_allreduce_fp32", "wire_share"} < set(logged[0]) & set(logged[-1])
        found[name] = {
            "trainer": small.model_bits(trainer.model),
            "by hand": by_hand(rank, workers, WAYS[name], folder / name),
            "evaluated": [row["eval_loss"] for row in logged if "eval_loss" in row],
            "losses": [row["loss"] for row in logged if "loss" in row],
            "sent": [row["slow_bytes"] for row in logged],
            "ranks": ranks,
        }
        trainer.train()  # from there on
        found[name]["again"] = small.model_bits(trainer.model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "names"), [(2, ["ab"]), (4, list(WAYS))])
def test_parameters_are_those_of_a_loop_of_ones_own(workers: int, names: list[str], tmp_path: Path) -> None:
    everyone = gang.run(compared, workers, workers, names, tmp_path, fresh=True)
    for name in names:
        found = [each[name] for each in everyone]
        assert len({each["trainer"] for each in found} | {each["by hand"] for each in found}) == 1, name
        assert found[0]["evaluated"] == found[-1]["evaluated"] and len(found[0]["evaluated"]) == 3
        assert found[0]["losses"][-1] < found[0]["losses"][0]
        assert found[0]["sent"] == sorted(found[0]["sent"]) and found[0]["sent"][-1] > 0
        assert bool(found[0]["ranks"]) == (name == "ab")
        assert len({each["again"] for each in found}) == 1


def resumed(rank: int, names: list[str], folder: Path) -> dict[str, Any]:
    """A run, and one that stops in the middle and is resumed; and what a checkpoint's model gives elsewhere."""
    from transformers import GPT2LMHeadModel

    found = {}
    for name in names:
        ends = []
        for number in range(2):
            out = folder / f"{name}{number}"
            trainer = trainer_of(rank, 2, WAYS[name], out, save_strategy="steps", save_steps=7)
            trainer.train(resume_from_checkpoint=str(folder / f"{name}0" / "checkpoint-7") if number else None)
            ends.append(small.model_bits(trainer.model))
        plain = GPT2LMHeadModel.from_pretrained(folder / f"{name}0" / "checkpoint-7")
        trainer.save_model(str(folder / f"{name}-end-{rank}"))
        if rank == 0:
            again = GPT2LMHeadModel.from_pretrained(folder / f"{name}-end-0")
            x = words(4)[0]["input_ids"][None]
            torch.testing.assert_close(again.eval()(x).logits, trainer.model.eval()(x).logits, rtol=1e-4, atol=1e-4)
        found[name] = *ends, sum(p.numel() for p in plain.parameters()), sum(p.numel() for p in gpt().parameters())
    return found


def check_resumed(names: list[str], folder: Path) -> None:
    for found in gang.run(resumed, 2, names, folder, fresh=True):
        for name, (whole, stopped, saved, full) in found.items():
            assert whole == stopped, name
            assert saved == full


@pytest.mark.slow
def test_a_run_is_resumed_in_the_middle_of_a_phase(tmp_path: Path) -> None:
    check_resumed(["ab"], tmp_path)


@pytest.mark.slow
def test_runs_by_every_method_are_resumed(tmp_path: Path) -> None:
    check_resumed(list(WAYS), tmp_path)


def with_the_best(rank: int, folder: Path) -> tuple[str, str]:
    """Evaluated and saved every 4 steps, with a rate that ruins the model at the end."""
    settings: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant", "learning_rate": 0.3}
    trainer = trainer_of(rank, 2, DiLoCo(every=4, group_size=1), folder, **settings)
    trainer.train()
    best = min(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-5)
    trainer = trainer_of(rank, 2, WAYS["ab"], folder / "ab", **settings)
    with pytest.raises(ConfigError) as caught:
        trainer.train()
    return small.model_bits(trainer.model), str(caught.value)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    (_, said), _ = found = gang.run(with_the_best, 2, tmp_path, fresh=True)
    assert len({bits for bits, _ in found}) == 1
    assert said.startswith("`load_best_model_at_end` with AB: checkpoints have the model in its full shape")


def adapted(rank: int, name: str, folder: Path) -> dict[str, Any]:
    """LoRA's adapters, trained on top of weights that are frozen; stopped and resumed too."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def model() -> Any:
        torch.manual_seed(1)
        return get_peft_model(gpt(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))

    ends = []
    for number in range(2):
        out = folder / f"{number}"
        trainer = trainer_of(rank, 2, WAYS[name], out, model(), save_strategy="steps", save_steps=7)
        trainer.train(resume_from_checkpoint=str(folder / "0" / "checkpoint-7") if number else None)
        ends.append(small.model_bits(trainer.model))
    x = words(4)[0]["input_ids"][None]
    frozen = dict(gpt().named_parameters())
    trainer.save_model(str(folder / f"end-{rank}"))
    if rank == 0:
        again = PeftModel.from_pretrained(gpt(), str(folder / "end-0"))
        torch.testing.assert_close(again.eval()(x).logits, trainer.model.eval()(x).logits, rtol=1e-4, atol=1e-4)
    base = trainer.model.get_base_model().transformer.wte.weight
    assert torch.equal(base, frozen["transformer.wte.weight"])
    return {"ends": ends, "sent": trainer.replica.traffic.slow_bytes}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["localsgd", "ab"])
def test_adapters_of_peft_are_trained(name: str, tmp_path: Path) -> None:
    needs.package("peft", "PEFT")
    found = gang.run(adapted, 2, name, tmp_path, fresh=True)
    assert len({end for each in found for end in each["ends"]}) == 1
    full = sum(4 * p.numel() for p in gpt().parameters())
    assert 0 < found[0]["sent"] < full  # all-reduce would send that in each of 12 steps


def refused(rank: int, folder: Path) -> list[str]:
    found = []
    for settings in ({"fp16": True}, {"auto_find_batch_size": True}, {"save_only_model": True}):
        with pytest.raises((ConfigError, ValueError)) as caught:
            trainer_of(rank, 2, AllReduce(), folder, **settings)
        found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_what_would_go_around_the_replica_is_refused(tmp_path: Path) -> None:
    half, batches, only = gang.run(refused, 2, tmp_path, fresh=True)[0]
    assert half == "`fp16` is not for ThinwireTrainer: leave it out; use bf16=True"
    assert batches == "`auto_find_batch_size` is not for ThinwireTrainer: leave it out"
    assert only == "`save_only_model` is not for ThinwireTrainer: leave it out"


def test_another_trainers_checkpoint_is_refused(tmp_path: Path) -> None:
    from thinwire.integrations.transformers import ThinwireTrainer

    with pytest.raises(ConfigError, match="it was not written by ThinwireTrainer; start from its model"):
        ThinwireTrainer._saved(None, str(tmp_path))  # type: ignore[arg-type]
