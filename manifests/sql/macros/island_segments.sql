-- Which segments did each island of a run go through itself, from its first step on? `SELECT * FROM island_segments('…')`
-- Parameter: target, name of the run.
-- Columns: checkpoint (that closes the segment), run, island, round, step. For a branch they begin in the run before it, up to the checkpoint that the
-- island goes on from.
CREATE MACRO island_segments(target) AS TABLE
WITH RECURSIVE parts (run, island, last_round) AS (
    SELECT run, island, max(round) FROM checkpoints WHERE run = target AND island <> -1 GROUP BY run, island
    UNION
    SELECT start_run, island, start_round FROM branch_starts WHERE run = target
    UNION
    SELECT b.start_run, b.island, b.start_round
    FROM parts AS p
    INNER JOIN branch_starts AS b ON b.run = p.run AND b.island = p.island
)

SELECT c.checkpoint, c.run, c.island, c.round, c.step
FROM checkpoints AS c
INNER JOIN parts AS p ON p.run = c.run AND p.island = c.island AND c.round <= p.last_round;
