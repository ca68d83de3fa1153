"""A Hugging Face Trainer on a tiny model that is made here, which saves and continues."""

import os
import signal
import sys

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
folder = os.environ["DISTDL_CHECKPOINTS"]


class Rows(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        words = torch.tensor([index % 30, (index * 7) % 30, 1])
        return {"input_ids": words, "labels": torch.tensor(index % 2)}


class Ends(TrainerCallback):
    """All ranks end at the same step."""

    def on_step_end(self, args, state, control, **more):
        ends = torch.tensor(float(bool(asked)))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(ends)
        if ends:
            control.should_save = control.should_training_stop = True


config = BertConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
)
arguments = TrainingArguments(
    output_dir=folder,
    use_cpu=True,
    ddp_backend="gloo",
    max_steps=int(sys.argv[1]),
    per_device_train_batch_size=4,
    save_steps=5,
    save_total_limit=2,
    report_to=[],
    logging_strategy="no",
    disable_tqdm=True,
    dataloader_num_workers=0,
)
trainer = Trainer(
    BertForSequenceClassification(config), arguments, train_dataset=Rows(), callbacks=[Ends()]
)
last = get_last_checkpoint(folder)
print("from step", last.rpartition("-")[2] if last else 0, flush=True)
trainer.train(resume_from_checkpoint=last)
if asked or trainer.state.global_step < int(sys.argv[1]):
    sys.exit(75)
print("done", flush=True)
