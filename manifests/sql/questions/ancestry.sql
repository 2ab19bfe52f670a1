-- What is the full ancestry of a checkpoint?
-- Parameter: checkpoint BLOB, the id of an island's or a global checkpoint.
-- Columns: run, island, round, step, checkpoint, tokens (of its own segment), written_at. One row for each island checkpoint that made it, the oldest
-- first; an island's checkpoint is itself the last of them.
SELECT a.run, a.island, a.round, a.step, a.checkpoint, coalesce(s.tokens, 0) AS tokens, c.written_at
FROM ancestors($checkpoint) AS a
INNER JOIN checkpoints AS c USING (checkpoint)
LEFT JOIN (
    SELECT checkpoint, sum(tokens)::BIGINT AS tokens FROM consumption_rounds
    GROUP BY checkpoint
) AS s USING (checkpoint)
ORDER BY c.written_at, a.run, a.island, a.round;
