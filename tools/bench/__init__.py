"""Benchmarks, run by hand: `python -m tools.bench.NAME`. Their results stand in docs/results/."""
