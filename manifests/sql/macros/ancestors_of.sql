-- Which island checkpoints made any of these checkpoints? `SELECT * FROM ancestors_of([from_hex('…'), from_hex('…')])`
-- Parameter: targets, ids of islands' or global checkpoints (list of BLOB).
-- Columns: checkpoint, run, island, round, step; a target itself is among them where it is an island's.
-- A checkpoint is made by its own segment, by its parents', and by all that had gone into the fragments that it had seen. An island's clock only
-- grows and it commits each round of a run once: so all that there is to know of an island is its newest round that went in, and the recursion takes a
-- step for each merge and branch on the way, not for each round.
CREATE MACRO ancestors_of(targets) AS TABLE
WITH RECURSIVE given AS MATERIALIZED (
    SELECT run, island, round, clock, merged FROM checkpoints
    WHERE checkpoint IN (SELECT unnest(targets))
),

merged AS MATERIALIZED (
    SELECT reader, fragment, version, run, island, round FROM merged_segments
),

newest (run, island, round) USING KEY (run, island) AS (
    SELECT run, island, max(round)
    FROM (
        SELECT run, island, round FROM given
        WHERE island <> -1
        UNION ALL
        SELECT c.run, c.island, c.round
        FROM (SELECT unnest(merged) AS checkpoint FROM given WHERE island = -1) AS part
        INNER JOIN checkpoints AS c USING (checkpoint)
        UNION ALL
        SELECT m.run, m.island, m.round
        FROM (
            SELECT run, unnest(clock) AS version, generate_subscripts(clock, 1) - 1 AS fragment
            FROM given
            WHERE island = -1
        ) AS seen
        INNER JOIN merged AS m ON m.reader = seen.run AND m.fragment = seen.fragment AND m.version <= seen.version
    )
    GROUP BY run, island
    UNION
    SELECT found.run, found.island, max(found.round)
    FROM (
        SELECT m.run, m.island, m.round
        FROM (
            SELECT run, fragment, max(version) AS version
            FROM (
                SELECT c.run, unnest(c.clock) AS version, generate_subscripts(c.clock, 1) - 1 AS fragment
                FROM newest AS n
                INNER JOIN checkpoints AS c ON c.run = n.run AND c.island = n.island AND c.round = n.round
            )
            GROUP BY run, fragment
        ) AS seen
        INNER JOIN merged AS m ON m.reader = seen.run AND m.fragment = seen.fragment AND m.version <= seen.version
        UNION ALL
        SELECT b.start_run, b.island, b.start_round
        FROM newest AS n
        INNER JOIN branch_starts AS b ON b.run = n.run AND b.island = n.island
    ) AS found
    LEFT JOIN recurring.newest AS known ON known.run = found.run AND known.island = found.island
    WHERE known.round IS NULL OR found.round > known.round
    GROUP BY found.run, found.island
)

SELECT c.checkpoint, c.run, c.island, c.round, c.step
FROM checkpoints AS c
INNER JOIN (SELECT run, island, max(round) AS round FROM newest GROUP BY run, island) AS n
    ON n.run = c.run AND n.island = c.island AND c.round <= n.round;
