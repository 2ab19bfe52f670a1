"""How the learning rates of the DiLoCo benchmark were chosen: the inner one for the large batch, then the outer ones for ours and torchft's, each by its own best.

`python -m tools.bench.diloco_sweep` prints the losses; they are of a seed that the benchmark doesn't report. What was chosen stands in diloco_quality.py by hand.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tools.bench.diloco_arms import Arm
from tools.bench.diloco_quality import FULL, Done, bench_folder, prepare, run_arms

SEED = 100
INNER = (1e-3, 2e-3, 4e-3)
OUTER = ((0.7, 0.9), (0.7, 0.6), (0.7, 0.3), (1.0, 0.3), (1.0, 0.1))
"""Rate and momentum; torchft's Nesterov wants one above 0."""


def main() -> None:
    """Runs what is asked for and prints a line for each arm, the best first."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.diloco_sweep", description=__doc__)
    parser.add_argument("of", choices=("inner", "ours", "torchft"), help="what is varied")
    parser.add_argument("--islands", type=int, default=FULL.main, help="M")
    options = parser.parse_args()
    arms = [Arm(kind="sync", islands=FULL.main)]
    if options.of != "inner":
        arms = [Arm(kind=options.of, islands=options.islands, outer=outer) for outer in OUTER]
    found = []
    with bench_folder() as folder:
        for lr in INNER if options.of == "inner" else (FULL.lr,):
            store, size = prepare(folder, replace(FULL, lr=lr))
            done = Done(folder / "arms.jsonl", size)
            run_arms([(arm, SEED) for arm in arms], store, size, done)
            found += [(done.losses[arm, SEED], lr, arm) for arm in arms]
    for loss, lr, arm in sorted(found, key=lambda row: row[0]):
        print(f"{loss:.4f}  {arm.name}, inner lr {lr:g}, outer lr {arm.outer[0]:g}, outer momentum {arm.outer[1]:g}")


if __name__ == "__main__":
    main()
