-- Which island checkpoints made a checkpoint? `SELECT * FROM ancestors(from_hex('…'))`
-- Parameter: target, the id of an island's or a global checkpoint (BLOB).
-- Columns: checkpoint, run, island, round, step; the target itself is among them where it is an island's.
-- A checkpoint is made by its own segment, by its parents', and by all that had gone into the fragments that it had seen: those merged in its run,
-- and in the runs that this one branches from up to the merge where it does. An island's clock only grows and it commits each round of a run once:
-- so the newest known checkpoint of each island says all, and the recursion takes a few steps, not one for each round.
CREATE MACRO ancestors(target) AS TABLE
WITH RECURSIVE lineage (run, ancestor, last_merge) AS (
    SELECT run, run, 2147483647 FROM runs
    UNION ALL
    SELECT l.run, r.parent_run, least(l.last_merge, (r.branch::JSON ->> 'merge')::INTEGER)
    FROM lineage AS l
    INNER JOIN runs AS r ON r.run = l.ancestor
    WHERE r.parent_run IS NOT NULL
),

contributions AS MATERIALIZED (
    SELECT l.run AS reader, m.fragment, m.version, c.run, c.island, c.round, m.checkpoint
    FROM merges AS m
    INNER JOIN lineage AS l ON l.ancestor = m.run AND m.merge <= l.last_merge
    INNER JOIN checkpoints AS c ON c.checkpoint = m.checkpoint
),

-- Where the checkpoints of a branch go on from: those of the run before.
starts AS MATERIALIZED (
    SELECT
        run,
        unnest(map_entries((branch::JSON -> 'island_checkpoints')::MAP(VARCHAR, VARCHAR)), recursive := true)
    FROM runs
    WHERE parent_run IS NOT NULL
),

heads (checkpoint) AS (
    SELECT checkpoint FROM checkpoints WHERE checkpoint = target
    UNION
    SELECT unnest(list_concat(
        coalesce((SELECT c.merged WHERE c.island = -1), []::BLOB []),
        coalesce((
            SELECT list(newest.checkpoint)
            FROM (
                SELECT arg_max(s.checkpoint, s.round) AS checkpoint
                FROM contributions AS s
                WHERE s.reader = c.run AND s.version <= c.clock[s.fragment + 1]
                GROUP BY s.run, s.island
            ) AS newest
        ), []::BLOB []),
        coalesce((
            SELECT list(unhex(b.value)) FROM starts AS b
            WHERE b.run = c.run AND b.key = c.island::VARCHAR AND b.value IS NOT NULL
        ), []::BLOB [])
    ))
    FROM heads AS h
    INNER JOIN checkpoints AS c ON c.checkpoint = h.checkpoint
),

newest AS (
    SELECT c.run, c.island, max(c.round) AS round
    FROM heads AS h
    INNER JOIN checkpoints AS c ON c.checkpoint = h.checkpoint
    WHERE c.island <> -1
    GROUP BY c.run, c.island
)

SELECT c.checkpoint, c.run, c.island, c.round, c.step
FROM checkpoints AS c
INNER JOIN newest AS n ON n.run = c.run AND n.island = c.island AND c.round <= n.round;
