"""A run in one thread: islands and syncer, a round of each in turn. A seed always comes to the same, whatever the machine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.island import Island
    from trainer.metrics import Metrics
    from trainer.run import Run
    from trainer.syncer import Syncer


def train_in_turn(
    run: Run,
    *,
    metrics: Sequence[Metrics] = (),
    on_round: Callable[[int, Syncer], None] | None = None,
    island_class: type[Island] | None = None,
) -> Syncer:
    """Trains to the end: what a round sends is merged right after it, and received a round later.

    Args:
        run: its first fragments lie in the store, nobody has trained for it yet.
        metrics: told by each island; none: by no one.
        on_round: told the number of every round that is over, and the syncer as it is then.
        island_class: what the islands are; None: Island.

    Returns:
        The syncer, for its state. Its run is over.
    """
    from trainer.island import Island
    from trainer.syncer import Syncer

    islands = [
        (island_class or Island)(
            run, number, emit=_ignore, metrics=metrics[number] if metrics else None, in_background=False
        )
        for number in range(run.config.num_islands)
    ]
    syncer = Syncer(run, emit=_ignore, in_background=False)
    syncer.sweep()  # of a branch: what its islands had sent before
    for round_ in range(1 + min(island.progress.round for island in islands), run.config.num_rounds + 1):
        for island in islands:
            if island.progress.round < round_:
                island.train_round()
        for island in islands:
            island.receive_now()  # what was merged a round ago
        syncer.sweep()
        if on_round is not None:
            on_round(round_, syncer)
    for island in islands:
        island.finish()
        island.close()
    assert syncer.serve() is not None
    return syncer


def _ignore(status: dict[str, Any]) -> None:
    pass
