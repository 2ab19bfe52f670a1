-- What was each island's holdout loss at the end of each outer cycle, and what did it read in it?
-- Parameter: run VARCHAR, its name.
-- Columns: island, round (that ends the cycle), holdout_loss (nats per token), share_s, share_a, share_b, share_c (of the cycle's tokens), tier_version (that it read).
-- A cycle runs from one measurement of the island's holdout loss to the next; the first begins with the run, and isn't counted: its start isn't on record.
WITH versions AS (
    SELECT island, round, max(tier_version) AS tier_version
    FROM mixtures
    WHERE run = $run
    GROUP BY island, round
),

measured AS (
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
    m.island,
    m.round,
    m.holdout_loss,
    m.s / (m.s + m.a + m.b + m.c) AS share_s,
    m.a / (m.s + m.a + m.b + m.c) AS share_a,
    m.b / (m.s + m.a + m.b + m.c) AS share_b,
    m.c / (m.s + m.a + m.b + m.c) AS share_c,
    v.tier_version
FROM measured AS m
ASOF LEFT JOIN versions AS v ON m.island = v.island AND m.round > v.round
WHERE m.s + m.a + m.b + m.c > 0
ORDER BY m.round, m.island;
