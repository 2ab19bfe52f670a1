-- By how much did each island's holdout loss fall in each outer cycle, and what did it read in it?
-- Parameter: run VARCHAR, its name.
-- Columns: island, round (that ends the cycle), descent (nats per token; negative: the loss rose), share_s, share_a, share_b, share_c (of the tokens).
-- A cycle runs from one measurement of the island's holdout loss to the next; the first has none before it, and isn't counted.
WITH measured AS (
    SELECT
        island,
        round,
        lag(holdout_loss) OVER w - holdout_loss AS descent,
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
    descent,
    s / (s + a + b + c) AS share_s,
    a / (s + a + b + c) AS share_a,
    b / (s + a + b + c) AS share_b,
    c / (s + a + b + c) AS share_c
FROM measured
WHERE descent IS NOT NULL AND s + a + b + c > 0
ORDER BY round, island;
