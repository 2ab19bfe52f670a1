"""Training in islands beside what it replaces: one large batch, and torchft's DiLoCo. Quality is diloco_quality.py's to measure, speed diloco_speed.py's."""

from __future__ import annotations

from collections.abc import Mapping

from tools.bench.diloco_quality import NOTES, measure_quality
from tools.bench.frame import Benchmark, Figure, run_benchmark


def measure(quick: bool) -> Mapping[str, Figure]:
    """The losses, then the times: nothing else may run beside these."""
    from tools.bench.diloco_speed import measure_speed

    return {**measure_quality(quick), **measure_speed(quick)}


BENCHMARK = Benchmark(
    name="diloco",
    question="What does training in islands cost in quality, against one large batch and torchft's DiLoCo at equal tokens, and what does it save in time?",
    measure=measure,
    notes=NOTES,
)

if __name__ == "__main__":
    run_benchmark(BENCHMARK)
