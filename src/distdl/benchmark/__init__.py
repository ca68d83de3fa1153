"""What `task=benchmark` measures with (docs/benchmark.md): clock, device limits, verdict, table."""
