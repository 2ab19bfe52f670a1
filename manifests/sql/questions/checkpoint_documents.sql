-- Which documents made a checkpoint, the most read first?
-- Parameter: checkpoint BLOB, the id of an island's or a global checkpoint.
-- Parameter: most BIGINT = 1000000, how many documents are listed at most.
-- Columns: doc_id, corpus, license, tier, spans, tokens, first_step (of any island), source_uri, source_row.
-- Forgotten documents are among them, with what their row still says.
WITH places AS (
    SELECT c.shard, c.shard_position, c.tier, count(*) AS spans, sum(c.tokens)::BIGINT AS tokens, min(c.step) AS first_step
    FROM consumption AS c
    INNER JOIN ancestors($checkpoint) AS a USING (checkpoint)
    GROUP BY ALL
),

known AS (
    SELECT shard, position AS shard_position, any_value(doc_id) AS doc_id
    FROM shards
    WHERE shard IN (SELECT shard FROM places)
    GROUP BY ALL
)

SELECT
    k.doc_id,
    any_value(d.corpus) AS corpus,
    any_value(d.license) AS license,
    p.tier,
    sum(p.spans)::BIGINT AS spans,
    sum(p.tokens)::BIGINT AS tokens,
    min(p.first_step) AS first_step,
    any_value(d.source_uri) AS source_uri,
    any_value(d.source_row) AS source_row
FROM places AS p
INNER JOIN known AS k USING (shard, shard_position)
LEFT JOIN raw.documents AS d ON d.doc_id = k.doc_id AND d.job IN (SELECT job FROM jobs)
GROUP BY k.doc_id, p.tier
ORDER BY tokens DESC, k.doc_id, p.tier
LIMIT $most;
