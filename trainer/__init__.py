"""The island layer: streams, islands, syncer, outer step, strategies, checkpoints, rollback."""
