"""Hugging Face's Trainer, its loop unchanged, on a model whose states lie on a drive. A second run goes on.

python examples/hugging_face_trainer.py --nvme /mnt/nvme --out run
torchrun --nproc-per-node 2 examples/hugging_face_trainer.py --nvme /mnt/nvme --out run
"""

import argparse
import functools
import os
import tempfile
from pathlib import Path

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

import zinf


class Trainer(transformers.Trainer):
    """Whose checkpoints are zinf's, so that neither the model nor the optimizer's states are ever held whole.

    To be given a model of zinf.shard and `optimizers=(zinf.AdamW, a schedule)`.
    """

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        # Between ranks zinf does what Accelerate's wrapper would do.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    def save_model(self, output_dir=None, _internal_call=False):
        folder = output_dir or self.args.output_dir
        zinf.export(self.model, folder)  # for from_pretrained
        if self.args.should_save:
            self.model.config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir):
        zinf.save(Path(output_dir, "zinf"), self.model, self._zinf_optimizer(), extra=self.lr_scheduler.state_dict())

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        pass  # with the optimizer's states below: a checkpoint of zinf has more digits than the exported weights

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(zinf.load(Path(checkpoint, "zinf"), self.model, self._zinf_optimizer()))

    def _zinf_optimizer(self):
        return getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it


class Characters(torch.utils.data.Dataset):
    """Pieces of a text, a token a character."""

    def __init__(self, text: str, length: int):
        self.pieces = torch.tensor(list(text.encode())).split(length)[:-1]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", help="a directory of the drive (a temporary one)")
    parser.add_argument("--out", help="where checkpoints go, and are taken up from (a temporary folder)")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    out = arguments.out or tempfile.mkdtemp()
    os.makedirs(out, exist_ok=True)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group()  # before the model is partitioned

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    model = zinf.shard(model, zinf.Config.preset("inf-nvme", nvme=[arguments.nvme or tempfile.mkdtemp()]))
    optimizer = zinf.AdamW(model.parameters(), lr=1e-3, grad_clip=1.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, arguments.steps)
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(
            out,
            max_steps=arguments.steps,
            save_steps=5,
            logging_steps=1,
            max_grad_norm=0,  # clipped by the optimizer, from the norm of all in float32
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=Characters(transformers.Trainer.__doc__, 64),
        optimizers=(optimizer, schedule),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out))


if __name__ == "__main__":
    main()
