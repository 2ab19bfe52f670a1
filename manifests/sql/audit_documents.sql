-- Which documents of certain labels did an island train on?
-- Parameter: run VARCHAR, its run.
-- Parameter: island INTEGER, its number.
-- Parameter: labels VARCHAR[], texts as audit.sql gives them.
-- Parameter: audited VARCHAR, the run that is looked at; NULL: all of them.
-- Parameter: inherited BLOB[], checkpoints of other runs whose segments are looked at, too.
-- Columns: run, island, doc_id (null: the shard stands in no index), shard, position, labels, first_step, last_step, tokens.
SELECT
    k.run,
    k.island,
    c.doc_id,
    c.shard,
    c.shard_position AS position,
    coalesce(l.labels, '[]') AS labels,
    min(c.step) AS first_step,
    max(c.step) AS last_step,
    sum(c.tokens)::BIGINT AS tokens
FROM consumption AS c
INNER JOIN checkpoints AS k USING (checkpoint)
LEFT JOIN shard_labels AS l USING (shard)
WHERE
    k.run = $run
    AND k.island = $island
    AND list_contains($labels::VARCHAR [], coalesce(l.labels, '[]'))
    AND ($audited::VARCHAR IS NULL OR k.run = $audited OR list_contains($inherited::BLOB [], checkpoint))
GROUP BY ALL
ORDER BY first_step, c.shard, c.shard_position;
