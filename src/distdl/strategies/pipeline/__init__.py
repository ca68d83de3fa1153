"""A model split into stages over devices: `strategy=pipeline` (docs/strategies/pipeline.md).

strategy.py        the Lightning strategy: steps, gradients, clipping, reductions
exchange.py        shares of the data, collectives, checkpoints
partition_plan.py  before the start: runs a sample, cuts the model, prints the table
engine.py          runs micro-batches through the stages, by torch.distributed.pipelining
stage_rules.py     which rank is which stage, and the checks before the start
The others have one task each: splitting, probe, balance, first_stage_loader, reduction.
"""
