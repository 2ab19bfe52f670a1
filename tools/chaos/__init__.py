"""Chaos: a run with real processes under seeded faults, and what must hold after it. The benchmark of it stands in tools/bench/chaos.py, the command in tools/commands/chaos.py."""
