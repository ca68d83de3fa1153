"""A model split into stages over devices: `strategy=pipeline` (docs/strategies/pipeline.md).

strategy.py   Lightning's side: steps, gradients, clipping, reductions, checkpoints
plan.py       before the start: a sample is run, the model is cut, the table is printed
engine.py     micro-batches through the stages, by torch.distributed.pipelining
exchange.py   shares of the data, collectives, checkpoints
The others own one thing each: place, splitting, probe, balance, loading, reduction, state, checks.
"""
