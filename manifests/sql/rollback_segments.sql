-- Which segments of which islands trained on any of these documents?
-- Parameter: documents, their ids (list of BLOB).
-- Columns: checkpoint (that closes the segment), first_step, steps (that had one of them), documents, tokens (of them), ids.
WITH places AS MATERIALIZED (
    SELECT DISTINCT shard, position AS shard_position, doc_id AS id
    FROM shards
    WHERE doc_id IN (SELECT unnest($documents::BLOB[]))
)

SELECT
    c.checkpoint,
    min(c.step) AS first_step,
    count(DISTINCT c.step) AS steps,
    count(DISTINCT p.id) AS documents,
    sum(c.tokens)::BIGINT AS tokens,
    list(DISTINCT p.id) AS ids
FROM consumption AS c
INNER JOIN places AS p USING (shard, shard_position)
-- Says nothing new, but lets the scan pass over the rows of all other shards.
WHERE c.shard IN (SELECT shard FROM places)
GROUP BY c.checkpoint;
