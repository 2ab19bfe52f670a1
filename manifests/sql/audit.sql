-- What did islands train on, by the labels that a policy decides by?
-- Parameter: run VARCHAR, name of a run; NULL: all of them.
-- Parameter: inherited BLOB[], checkpoints of other runs whose segments are looked at, too.
-- Columns: run, island, labels (as in shard_labels; `[]`: the shard stands in no index), segments, tokens, documents.
-- The run and the island are those of the checkpoint that closes the segment.
WITH audited AS (
    SELECT checkpoint, run, island
    FROM checkpoints
    WHERE $run::VARCHAR IS NULL OR run = $run OR list_contains($inherited::BLOB [], checkpoint)
),

sums AS (
    SELECT a.run, a.island, coalesce(l.labels, '[]') AS labels, count(DISTINCT checkpoint) AS segments, sum(r.tokens)::BIGINT AS tokens
    FROM consumption_rounds AS r
    INNER JOIN audited AS a USING (checkpoint)
    LEFT JOIN shard_labels AS l USING (shard)
    GROUP BY ALL
),

counts AS (
    SELECT a.run, a.island, coalesce(l.labels, '[]') AS labels, count(DISTINCT (c.shard, c.shard_position)) AS documents
    FROM consumption AS c
    INNER JOIN audited AS a USING (checkpoint)
    LEFT JOIN shard_labels AS l USING (shard)
    GROUP BY ALL
)

SELECT run, island, labels, segments, tokens, coalesce(documents, 0) AS documents
FROM sums
LEFT JOIN counts USING (run, island, labels)
ORDER BY run, island, labels;
