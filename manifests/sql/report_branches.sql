-- Which runs branch from a run, and how good did they get?
-- Parameter: run, its name.
-- Columns: run, took_back (the condition over documents), kept_merges (of this run), tokens, holdout_loss (of its last global checkpoint; null: none yet).
SELECT
    r.run,
    any_value(r.branch::JSON ->> 'predicate') AS took_back,
    any_value((r.branch::JSON ->> 'merge')::INTEGER) AS kept_merges,
    arg_max(c.tokens, c.written_at) AS tokens,
    arg_max(c.holdout_loss, c.written_at) AS holdout_loss
FROM runs AS r
LEFT JOIN checkpoints AS c ON c.run = r.run AND c.island = -1
WHERE r.parent_run = $run
GROUP BY r.run
ORDER BY r.run;
