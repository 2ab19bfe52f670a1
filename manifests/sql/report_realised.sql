-- Which mixes did the islands of a run train on, outer cycle by outer cycle?
-- Parameters: run, its name; cycle_steps, inner steps in an outer cycle; bars, the most rows that an island gets: where there are more cycles
-- than that, a row sums up several.
-- Columns: island, step (the middle of the row's steps), steps (how many there are), s, a, b, c (shares of the tokens).
WITH spans AS (
    SELECT *, (step - 1) // $cycle_steps AS cycle, max((step - 1) // $cycle_steps) OVER () AS last_cycle
    FROM consumption
    WHERE run = $run
)

SELECT
    island,
    (min(step) + max(step)) / 2 AS step,
    max(step) - min(step) + 1 AS steps,
    coalesce(sum(tokens) FILTER (WHERE tier = 'S'), 0) / sum(tokens) AS s,
    coalesce(sum(tokens) FILTER (WHERE tier = 'A'), 0) / sum(tokens) AS a,
    coalesce(sum(tokens) FILTER (WHERE tier = 'B'), 0) / sum(tokens) AS b,
    coalesce(sum(tokens) FILTER (WHERE tier = 'C'), 0) / sum(tokens) AS c
FROM spans
GROUP BY island, cycle // ceil((last_cycle + 1) / $bars)::BIGINT
ORDER BY island, min(step);
