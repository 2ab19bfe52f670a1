-- How did the training loss of a run's islands go?
-- Parameters: run, its name; points, the most rows that an island gets.
-- Columns: island, step (last of the steps that the row sums up), loss (mean over their tokens, nats per token).
WITH spans AS (
    SELECT island, step, tokens, loss::DOUBLE AS loss, min(step) OVER island AS first_step, max(step) OVER island AS last_step
    FROM consumption
    WHERE run = $run AND loss IS NOT NULL
    WINDOW island AS (PARTITION BY island)
)

SELECT island, max(step) AS step, sum(loss * tokens) / sum(tokens) AS loss
FROM spans
GROUP BY island, (step - first_step) // ceil((last_step - first_step + 1) / $points)::BIGINT
ORDER BY island, step;
