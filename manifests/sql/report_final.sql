-- How did a run's islands and its global state end up?
-- Parameter: run, its name.
-- Columns: island (number, or 'global'), strategy, mix (last one decided on, weights of S/A/B/C as in .20/.40/.30/.10), steps, tokens, train_loss,
-- holdout_loss (the last ones measured), starts, merges (that it took part in; for the global state: all). Null where unknown.
-- Steps and tokens are the islands' own counters; an island of a branch that has done nothing yet shows the checkpoint that it starts from.
WITH this_run AS (
    SELECT config::JSON AS config, branch::JSON AS branch
    FROM runs
    WHERE run = $run
),

islands AS (
    SELECT unnest(range((config ->> 'num_islands')::INTEGER))::INTEGER AS island FROM this_run
    UNION ALL
    SELECT -1
),

counted AS (
    SELECT
        c.island,
        arg_max(c.step, c.written_at) AS steps,
        arg_max(c.tokens, c.written_at) AS tokens,
        arg_max(c.loss, c.written_at) FILTER (WHERE c.loss IS NOT NULL) AS train_loss,
        arg_max(c.holdout_loss, c.written_at) FILTER (WHERE c.holdout_loss IS NOT NULL) AS holdout_loss
    FROM checkpoints AS c
    WHERE
        c.run = $run
        OR c.checkpoint IN (
            SELECT unhex(r.branch -> 'island_checkpoints' ->> i.island::VARCHAR)
            FROM this_run AS r
            CROSS JOIN islands AS i
        )
    GROUP BY c.island
),

decided AS (
    SELECT *
    FROM mixtures
    WHERE run = $run
    QUALIFY row_number() OVER (PARTITION BY island ORDER BY written_at DESC, round DESC) = 1
),

joined AS (
    SELECT island, count(*) AS starts
    FROM events
    WHERE run = $run AND kind = 'island_joined'
    GROUP BY island
),

merged AS (
    SELECT coalesce(island, -1) AS island, count(DISTINCT merge) AS merges
    FROM merges
    WHERE run = $run
    GROUP BY GROUPING SETS ((island), ())
)

SELECT
    CASE WHEN i.island = -1 THEN 'global' ELSE i.island::VARCHAR END AS island,
    d.strategy,
    replace(
        format('{:.2f}/{:.2f}/{:.2f}/{:.2f}', d.weight_s, d.weight_a, d.weight_b, d.weight_c), '0.', '.'
    ) AS mix,
    c.steps,
    c.tokens,
    c.train_loss,
    c.holdout_loss,
    CASE WHEN i.island >= 0 THEN coalesce(j.starts, 0) END AS starts,
    coalesce(m.merges, 0) AS merges
FROM islands AS i
LEFT JOIN counted AS c USING (island)
LEFT JOIN decided AS d USING (island)
LEFT JOIN joined AS j USING (island)
LEFT JOIN merged AS m USING (island)
ORDER BY i.island = -1, i.island;
