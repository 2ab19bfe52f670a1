-- How did a run's global state do, checkpoint by checkpoint?
-- Parameter: run, its name.
-- Columns: merge (number of its last merge), tokens (that were merged), holdout_loss. The oldest first.
SELECT
    (regexp_extract(object, '(\d+)\.json$', 1))::INTEGER AS merge,
    tokens,
    holdout_loss
FROM checkpoints
WHERE run = $run AND island = -1 AND holdout_loss IS NOT NULL
ORDER BY merge;
