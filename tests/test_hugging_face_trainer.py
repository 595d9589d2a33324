"""Hugging Face's Trainer, as the example has it, against the Trainer with plain torch."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

import zinf

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parent.parent / "examples" / "hugging_face_trainer.py"
STEPS = 6
ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


def example():
    spec = importlib.util.spec_from_file_location("hugging_face_trainer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt2():
    torch.manual_seed(0)
    size = {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def trainer_of(kind, model, optimizer, folder, **arguments):
    """Dropout, accumulation, clipping and a schedule, as people have them."""
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    text = "Nothing is decided here, and all is moved. " * 40
    return kind(
        model=model,
        args=transformers.TrainingArguments(str(folder), **settings | arguments),
        train_dataset=example().Characters(text, 32),
        optimizers=(optimizer, transformers.get_cosine_schedule_with_warmup(optimizer, 2, STEPS)),
    )


def losses(trainer, **how):
    trainer.train(**how)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain_losses(folder, **arguments):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return losses(trainer_of(transformers.Trainer, model, optimizer, folder, **arguments))


def ours(nvme, folder, dtype=torch.float32, **arguments):
    model = zinf.shard(gpt2(), zinf.Config.preset("inf-nvme", nvme=[nvme], dtype=dtype, resident=0))
    optimizer = zinf.AdamW(model.parameters(), **ADAM)
    return trainer_of(example().Trainer, model, optimizer, folder, **arguments)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_losses_are_those_of_plain_torch(nvme, tmp_path, gradient_checkpointing):
    wanted = plain_losses(tmp_path, gradient_checkpointing=gradient_checkpointing)
    found = losses(ours(nvme, tmp_path, gradient_checkpointing=gradient_checkpointing))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0] - 0.01  # it has learned


def test_a_run_that_is_taken_up_goes_on_bit_for_bit(nvme, tmp_path):
    whole = ours(nvme, tmp_path / "whole", torch.bfloat16)
    wanted = losses(whole)
    saving = {"save_strategy": "steps", "save_steps": 3}
    losses(ours(nvme, tmp_path / "run", torch.bfloat16, **saving, max_steps=3))
    resumed = ours(nvme, tmp_path / "run", torch.bfloat16, **saving)
    assert losses(resumed, resume_from_checkpoint=True) == wanted
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_its_checkpoints_are_for_from_pretrained_as_well(nvme, tmp_path):
    trainer = ours(nvme, tmp_path, save_strategy="steps", save_steps=STEPS)
    losses(trainer)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    for name, value in again.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


def of_two(rank, world, kind, *where):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    assert transformers.TrainingArguments("", use_cpu=True).world_size == world
    return plain_losses(*where) if kind == "plain" else losses(ours(*where))


def test_two_ranks_compute_what_ranks_of_plain_torch_do(ranks, nvme, tmp_path):
    wanted = ranks(of_two, 2, "plain", tmp_path, fresh=True)
    found = ranks(of_two, 2, "ours", nvme, tmp_path, fresh=True)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert len(found[0]) == STEPS
