-- Which segments have other tokens on record than their islands counted?
-- Parameter: run VARCHAR, name of a run; NULL: all of them.
-- Parameter: inherited BLOB[], checkpoints of other runs whose segments are looked at, too.
-- Columns: run, island, checkpoint, counted (tokens, by the checkpoint and the one before it), recorded (tokens in consumption).
WITH recorded AS (
    SELECT checkpoint, sum(tokens)::BIGINT AS tokens
    FROM consumption
    GROUP BY checkpoint
)

SELECT c.run, c.island, c.checkpoint, c.tokens - coalesce(p.tokens, 0) AS counted, coalesce(r.tokens, 0) AS recorded
FROM checkpoints AS c
LEFT JOIN checkpoints AS p ON p.checkpoint = c.parent
LEFT JOIN recorded AS r ON r.checkpoint = c.checkpoint
WHERE
    c.island <> -1
    AND counted <> recorded
    AND ($run::VARCHAR IS NULL OR c.run = $run OR list_contains($inherited::BLOB [], c.checkpoint))
ORDER BY c.run, c.island, c.round;
