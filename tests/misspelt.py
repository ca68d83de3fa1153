"""Config files with one mistake each, for the schemas of config files: what a person types, and the
line of it. `-> KIND` names the folder of the file in `conf/`."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The mistake is in the line with `#!`.
TEXTS = r"""
-> experiment/section
trainr:  #!
  max_epochs: 3
-> experiment/trainer_key
trainer:
  max_epoch: 3  #!
-> experiment/precision
trainer:
  precision: fp16  #!
-> experiment/devices
trainer:
  devices: two  #!
-> experiment/accelerator
trainer:
  accelerator: tpuu  #!
-> experiment/epochs
trainer:
  max_epochs: ten  #!
-> experiment/owned
trainer:
  logger: true  #!
-> experiment/lightnings
trainer:
  gradient_clip_algoritm: norm  #!
-> experiment/rate
defaults:
  - override /optimizer: sgd
optimizer:
  lrr: 0.1  #!
-> experiment/rate_of_any
optimizer:
  learning_rate: 0.1  #!
-> experiment/argument
optimizer:
  momentun: 0.9  #!
-> experiment/text_for_a_number
optimizer:
  lr: fast  #!
-> experiment/choice
optimizer:
  lr_scaling: liner  #!
-> experiment/of_another_option
defaults:
  - override /optimizer: sgd
optimizer:
  betas: [0.9, 0.99]  #!
-> experiment/inside_a_network
defaults:
  - override /model: resnet18
model:
  network:
    zero_init_residul: true  #!
-> experiment/of_a_detector
defaults:
  - override /model: maskrcnn
model:
  network:
    min_sise: 800  #!
-> experiment/model_key
model:
  label_smooting: 0.1  #!
-> experiment/group
defaults:
  - override /modle: resnet18  #!
-> experiment/option
defaults:
  - override /model: resnet19  #!
-> experiment/no_slash
defaults:
  - override model: resnet18  #!
-> experiment/base
defaults:
  - resnet50_ddpp  #!
-> experiment/data_key
data:
  batchsize: 8  #!
-> experiment/zero
data:
  batch_size: 0  #!
-> experiment/of_other_data
defaults:
  - override /data: synthetic
data:
  root: photographs  #!
-> experiment/monitor
checkpoint:
  monitr: val/acc1  #!
-> experiment/mode
checkpoint:
  mode: maximum  #!
-> experiment/kept
checkpoint:
  keep_last: 0  #!
-> experiment/watchdog
watchdog:
  timeot: 60  #!
-> experiment/callback_key
callbacks:
  trace:
    skip_batch: 3  #!
-> experiment/callback_of_lightnings
callbacks:
  early_stopping:
    patiance: 3  #!
-> experiment/callback_without_a_class
callbacks:
  stop: {patience: 3}  #!
-> experiment/callbacks_as_a_list
callbacks: [ema]  #!
-> experiment/tracker
tracking:
  mlflow:
    tracking_url: http://example.com  #!
-> experiment/launcher
defaults:
  - override /launcher: slurm
launcher:
  walltme: "1:00:00"  #!
-> experiment/strategy
defaults:
  - override /strategy: ddp
strategy:
  bucket_cap: 25  #!
-> experiment/schedule
schedule:
  warmup_epoch: 5  #!
-> experiment/below_zero
schedule:
  warmup_epochs: -1  #!
-> experiment/seed
seed: -1  #!
-> experiment/name
name: my run  #!
-> experiment/flag
dry_run: maybe  #!
-> experiment/list
project:
  allow: chemprop  #!
-> experiment/no_path
model:
  _target_: ImageClassifier  #!
-> experiment/class
optimizer:
  _target_: torch.optim.SDG  #!
  lr: 0.1
-> experiment/schedule_class
schedule:
  _target_: torch.optim.lr_scheduler.StepLr  #!
  step_size: 3
-> experiment/schedule_argument
schedule:
  _target_: torch.optim.lr_scheduler.StepLR
  step_sise: 3  #!
-> experiment/network_class
model:
  network:
    _target_: torchvision.models.resnet81  #!
-> experiment/callback_class
callbacks:
  stop:
    _target_: lightning.pytorch.callbacks.EarlyStoping  #!
    monitor: val/loss
-> experiment/own_argument
defaults:
  - override /model: forecaster
model:
  hiden: 32  #!
-> experiment/own_type
model:
  _target_: waves.model.Forecaster
  hidden: many  #!
-> experiment/own_group
defaults:
  - override /data: wave  #!
-> experiment/program
program:
  comand: [python, train.py]  #!
-> experiment/program_per
program:
  command: [python, train.py]
  per: host  #!
-> debug/short
trainer:
  limit_train_batch: 3  #!
-> model/narrow
defaults:
  - classifier
  - _self_
label_smooth: 0.1  #!
-> model/wide
defaults:
  - clasifier  #!
  - _self_
-> model/mine
_target_: waves.model.Forecaster
windw: 16  #!
-> optimizer/mine
_target_: torch.optim.AdamW
momentum: 0.9  #!
-> data/mine
_target_: waves.data.Waves
batch_size: 8
nois: 0.1  #!
-> launcher/mine
defaults:
  - slurm
partitions: gpu  #!
-> callbacks/mine
early_stopping:
  _target_: lightning.pytorch.callbacks.EarlyStopping
  monitr: val/loss  #!
-> tracking/mine
csv:
  _target_: lightning.pytorch.loggers.CSVLogger
  save_dirr: logs  #!
-> trainer/mine
max_epoch: 3  #!
-> schedule/mine
_target_: distdl.optim.warmup_cosine
min_lr: 0.0  #!
-> strategy/mine
_target_: distdl.strategies.FSDPStrategy
reshard: true  #!
-> task/mine
_target_: distdl.tasks.predict
topk: 3  #!
-> optimizer/everything
# @package _global_
model:
  label_smothing: 0.1  #!
"""


@dataclass(frozen=True)
class Misspelt:
    """A file, and the number of the line with the mistake, from 1."""

    kind: str
    name: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


def _read(part: str) -> Misspelt:
    place, text = part.split("\n", 1)
    kind, name = place.strip().split("/")
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("#!"))
    return Misspelt(kind, name, re.sub(r"\s*#!$", "", text, flags=re.MULTILINE), line)


MISSPELT = [_read(part) for part in TEXTS.split("\n-> ")[1:]]
