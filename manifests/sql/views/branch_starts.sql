-- From which checkpoint does an island of a branch go on?
-- One row for each such island of each branch: run, island, checkpoint, start_run (the run that the checkpoint is of), start_round. An island that
-- starts anew, from the global state alone, has none.
CREATE VIEW branch_starts AS
SELECT b.run, c.island, c.checkpoint, c.run AS start_run, c.round AS start_round
FROM (
    SELECT run, unnest(map_values((branch::JSON -> 'island_checkpoints')::MAP(VARCHAR, VARCHAR))) AS start
    FROM runs
    WHERE parent_run IS NOT NULL
) AS b
INNER JOIN checkpoints AS c ON c.checkpoint = unhex(b.start);
