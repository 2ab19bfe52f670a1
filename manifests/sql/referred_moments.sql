-- To which moments may somebody still want to look back, because something was decided or saved then?
-- Columns: written_at. One row for each tier version, each pool of shards, each run's creation, each global checkpoint, and each anchor of an
-- island whose run has not finished.
-- A rollback of a run that is under way goes back to its anchors. Once a run has finished, what it was made of is asked from its global checkpoints.
SELECT written_at FROM jobs
WHERE kind IN ('tier', 'shard')
UNION ALL
SELECT written_at FROM runs
UNION ALL
SELECT written_at FROM checkpoints
WHERE island = -1 OR (anchor AND run NOT IN (SELECT run FROM events WHERE kind = 'finished'));
