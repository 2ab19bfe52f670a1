-- How did the holdout loss of a run's islands and of its global state go?
-- Parameter: run, its name.
-- Columns: island (-1: the global state), step (for the global state the mean over the islands merged), holdout_loss.
SELECT
    island,
    CASE WHEN island = -1 THEN step / greatest(len(merged), 1) ELSE step END AS step,
    holdout_loss
FROM checkpoints
WHERE run = $run AND holdout_loss IS NOT NULL
ORDER BY island = -1, island, written_at;
