-- Which island checkpoints made a run: its own, and all that had gone into them? `SELECT * FROM run_ancestors('…')`
-- Parameter: target, name of the run.
-- Columns: checkpoint, run, island, round, step. For a branch those of the run before it are among them, as far as they went into it.
CREATE MACRO run_ancestors(target) AS TABLE
SELECT checkpoint, run, island, round, step
FROM ancestors_of((
    -- The newest of each island and of the global state: all others are in these.
    SELECT coalesce(list(checkpoint), [])
    FROM (
        SELECT checkpoint
        FROM checkpoints
        WHERE run = target
        QUALIFY row_number() OVER (PARTITION BY island ORDER BY round DESC, written_at DESC) = 1
    )
));
