-- Where did an island's strategy want the borders between the tiers, step by step?
-- Parameters: run, its name; round_steps, inner steps in a round.
-- Columns: island, step (from which it holds), strategy, s, sa, sab (sums of the weights up to tier S, A and B). Of several decisions on a round the
-- last counts; one that came after the island's last step is left out. The last row of an island repeats the one before, at its last step.
WITH decided AS (
    SELECT
        island,
        round * $round_steps + 0.5 AS step,
        strategy,
        weight_s AS s,
        weight_s + weight_a AS sa,
        weight_s + weight_a + weight_b AS sab
    FROM mixtures
    WHERE run = $run
    QUALIFY row_number() OVER (PARTITION BY island, round ORDER BY written_at DESC) = 1
),

trained AS (
    SELECT island, max(step) + 0.5 AS last_step
    FROM consumption
    WHERE run = $run
    GROUP BY island
),

used AS (
    SELECT d.*, coalesce(t.last_step, d.step + $round_steps) AS last_step
    FROM decided AS d
    LEFT JOIN trained AS t USING (island)
    WHERE t.last_step IS NULL OR d.step < t.last_step
)

SELECT island, step, strategy, s, sa, sab FROM used
UNION ALL
(
    SELECT island, last_step, strategy, s, sa, sab
    FROM used
    QUALIFY row_number() OVER (PARTITION BY island ORDER BY step DESC) = 1
)
ORDER BY island, step;
