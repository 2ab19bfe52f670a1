-- What was each island's holdout loss at the end of each outer cycle, and what did it read in it?
-- Parameter: run VARCHAR, its name.
-- Columns: island, round (that ends the cycle), holdout_loss (nats per token), share_s, share_a, share_b, share_c (of the cycle's tokens).
-- A cycle runs from one measurement of the island's holdout loss to the next; the first begins with the run, and isn't counted: its start isn't on record.
WITH measured AS (
    SELECT
        island,
        round,
        holdout_loss,
        tokens_s - lag(tokens_s) OVER w AS s,
        tokens_a - lag(tokens_a) OVER w AS a,
        tokens_b - lag(tokens_b) OVER w AS b,
        tokens_c - lag(tokens_c) OVER w AS c
    FROM checkpoints
    WHERE run = $run AND island >= 0 AND isfinite(holdout_loss)
    WINDOW w AS (PARTITION BY island ORDER BY round)
)

SELECT
    island,
    round,
    holdout_loss,
    s / (s + a + b + c) AS share_s,
    a / (s + a + b + c) AS share_a,
    b / (s + a + b + c) AS share_b,
    c / (s + a + b + c) AS share_c
FROM measured
WHERE s + a + b + c > 0
ORDER BY round, island;
