-- How much training does an audit look at?
-- Parameter: run VARCHAR, name of a run; NULL: all of them.
-- Parameter: inherited BLOB[], checkpoints of other runs whose segments are looked at, too.
-- Columns: tokens, documents (different ones), segments.
SELECT
    coalesce(sum(c.tokens), 0)::BIGINT AS tokens,
    count(DISTINCT (c.shard, c.shard_position)) AS documents,
    count(DISTINCT checkpoint) AS segments
FROM consumption AS c
INNER JOIN checkpoints AS k USING (checkpoint)
WHERE $run::VARCHAR IS NULL OR k.run = $run OR list_contains($inherited::BLOB [], checkpoint);
