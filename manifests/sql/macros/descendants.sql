-- Which checkpoints were made by any of these segments? `SELECT * FROM descendants([from_hex('…'), from_hex('…')])`
-- Parameter: sources, ids of the islands' checkpoints that close the segments (list of BLOB).
-- Columns: checkpoint, run, island (-1: global), round, step, how: 'trained' (it is one of these), 'inherited' (its island went on from one of these,
-- in this run or in the one before), 'merged' (one of these had gone into a fragment that it had seen).
-- The same relation as ancestors_of, the other way round. An island's clock only grows and it commits each round of a run once: so all that there is
-- to know of an island is the first of its rounds that was made so, and the recursion takes a step for each merge and branch on the way, not for each
-- round.
CREATE MACRO descendants(sources) AS TABLE
WITH RECURSIVE given AS MATERIALIZED (
    SELECT checkpoint, run, island, round
    FROM checkpoints
    WHERE island <> -1 AND checkpoint IN (SELECT unnest(sources))
),

merged AS MATERIALIZED (
    SELECT reader, fragment, version, run, island, round FROM merged_segments
),

-- What an island did itself: from its first round on, or from the start of a branch that goes on from there.
inherited (run, island, round) AS (
    SELECT run, island, min(round) FROM given GROUP BY run, island
    UNION
    SELECT b.run, b.island, 0
    FROM inherited AS i
    INNER JOIN branch_starts AS b ON b.start_run = i.run AND b.island = i.island AND b.start_round >= i.round
),

first_inherited AS MATERIALIZED (
    SELECT run, island, min(round) AS round FROM inherited GROUP BY run, island
),

made (run, island, round) USING KEY (run, island) AS (
    SELECT run, island, round FROM first_inherited
    UNION
    SELECT found.run, found.island, min(found.round)
    FROM (
        SELECT c.run, c.island, c.round
        FROM (
            SELECT m.reader, m.fragment, min(m.version) AS version
            FROM made AS n
            INNER JOIN merged AS m ON m.run = n.run AND m.island = n.island AND m.round >= n.round
            GROUP BY m.reader, m.fragment
        ) AS touched
        INNER JOIN checkpoints AS c ON c.run = touched.reader AND c.clock[touched.fragment + 1] >= touched.version
        WHERE c.island <> -1
        UNION ALL
        SELECT b.run, b.island, 0
        FROM made AS n
        INNER JOIN branch_starts AS b ON b.start_run = n.run AND b.island = n.island AND b.start_round >= n.round
    ) AS found
    LEFT JOIN recurring.made AS known ON known.run = found.run AND known.island = found.island
    WHERE known.round IS NULL OR found.round < known.round
    GROUP BY found.run, found.island
),

first_made AS MATERIALIZED (
    SELECT run, island, min(round) AS round FROM made GROUP BY run, island
),

-- A global checkpoint by the versions of its fragments, and by the last checkpoints that it names itself.
touched_versions AS (
    SELECT m.reader, m.fragment, min(m.version) AS version
    FROM first_made AS n
    INNER JOIN merged AS m ON m.run = n.run AND m.island = n.island AND m.round >= n.round
    GROUP BY m.reader, m.fragment
),

global_states AS (
    SELECT c.checkpoint
    FROM touched_versions AS t
    INNER JOIN checkpoints AS c ON c.run = t.reader AND c.clock[t.fragment + 1] >= t.version
    WHERE c.island = -1
    UNION ALL
    SELECT g.checkpoint
    FROM (SELECT checkpoint, unnest(merged) AS part FROM checkpoints WHERE island = -1) AS g
    INNER JOIN checkpoints AS c ON c.checkpoint = g.part
    INNER JOIN first_made AS n ON n.run = c.run AND n.island = c.island AND c.round >= n.round
)

SELECT
    c.checkpoint,
    c.run,
    c.island,
    c.round,
    c.step,
    CASE
        WHEN c.checkpoint IN (SELECT checkpoint FROM given) THEN 'trained'
        WHEN c.round >= i.round THEN 'inherited'
        ELSE 'merged'
    END AS how
FROM checkpoints AS c
INNER JOIN first_made AS n ON n.run = c.run AND n.island = c.island AND c.round >= n.round
LEFT JOIN first_inherited AS i ON i.run = c.run AND i.island = c.island
UNION ALL
SELECT checkpoint, run, island, round, step, 'merged'
FROM checkpoints
WHERE checkpoint IN (SELECT checkpoint FROM global_states);
