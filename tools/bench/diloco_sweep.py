"""How the learning rates of the DiLoCo benchmark were chosen: for the large batch, for ours and for torchft, each by its own best.

`python -m tools.bench.diloco_sweep` prints the losses; they are of a seed that the benchmark doesn't report. What was chosen stands in diloco_quality.py by hand.
"""

from __future__ import annotations

import argparse

from tools.bench.diloco_arms import Arm
from tools.bench.diloco_quality import FULL, Done, bench_folder, prepare, run_arms

SEED = 100
INNER = (1e-3, 2e-3, 4e-3, 6e-3)
OUTER = ((0.7, 0.9), (0.7, 0.6), (0.7, 0.3), (1.0, 0.3), (1.0, 0.1))
"""Rate and momentum; torchft's Nesterov wants one above 0."""


def main() -> None:
    """Runs what is asked for and prints a line for each arm, the best first."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.diloco_sweep", description=__doc__)
    parser.add_argument("of", choices=("sync", "ours", "torchft"), help="what is varied")
    parser.add_argument("--islands", type=int, default=FULL.main, help="M")
    parser.add_argument("--inner", type=float, nargs="+", default=INNER, help="inner learning rates")
    options = parser.parse_args()
    outers = OUTER[:1] if options.of == "sync" else OUTER
    arms = [Arm(kind=options.of, islands=options.islands, lr=lr, outer=o) for lr in options.inner for o in outers]
    with bench_folder() as folder:
        store, size = prepare(folder, FULL)
        done = Done(folder / "arms.jsonl", size)
        run_arms([(arm, SEED) for arm in arms], store, size, done)
    for arm in sorted(arms, key=lambda arm: done.losses[arm, SEED]):
        print(
            f"{done.losses[arm, SEED]:.4f}  {arm.name}, inner lr {arm.lr:g}, outer {arm.outer[0]:g}, {arm.outer[1]:g}"
        )


if __name__ == "__main__":
    main()
