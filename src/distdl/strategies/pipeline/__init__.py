"""A model split into stages over devices: `strategy=pipeline` (docs/strategies/pipeline.md).

strategy.py        Lightning's side: steps, gradients, clipping, reductions
exchange.py        shares of the data, collectives, checkpoints
partition_plan.py  before the start: a sample is run, the model is cut, the table is printed
engine.py          micro-batches through the stages, by torch.distributed.pipelining
stage_rules.py     which rank is which stage, and what is refused before the start
The others own one thing each: splitting, probe, balance, first_stage_loader, reduction.
"""
