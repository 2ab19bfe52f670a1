-- Which checkpoints saw a document?
-- Parameter: doc_id BLOB, its id, as in documents and consumption.
-- Columns: run, island (-1: global), checkpoint, round, step, how ('trained': its own segment read the document; 'inherited': an earlier segment of the
-- same island did, in this run or in the one that it branches from; 'merged': it came with a fragment that others had been merged into), tokens (of
-- the document that its own segment read; 0 where it only came from elsewhere), written_at.
WITH places AS (
    SELECT DISTINCT shard, position AS shard_position FROM shards
    WHERE doc_id = $doc_id
),

trained AS MATERIALIZED (
    SELECT c.checkpoint, sum(c.tokens)::BIGINT AS tokens
    FROM consumption AS c
    INNER JOIN places USING (shard, shard_position)
    GROUP BY c.checkpoint
)

SELECT d.run, d.island, d.checkpoint, d.round, d.step, d.how, coalesce(t.tokens, 0) AS tokens, c.written_at
FROM descendants((SELECT coalesce(list(checkpoint), []) FROM trained)) AS d
INNER JOIN checkpoints AS c USING (checkpoint)
LEFT JOIN trained AS t USING (checkpoint)
ORDER BY c.written_at, d.run, d.island, d.round;
