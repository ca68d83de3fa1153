"""Schedulers of torchx: an app goes through a launcher of distdl's (docs/torchx.md)."""
