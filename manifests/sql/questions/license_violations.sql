-- Which documents were trained on whose licence is not an allowed one?
-- Parameter: allowed VARCHAR[], the licences that are allowed, written as in documents.
-- Parameter: run VARCHAR = NULL, only what made this run; all runs by default.
-- Columns: run, island (that trained on it), corpus, license, shard, doc_id, tokens, first_step.
-- For a branch, what the run before it brought in is among it. The sums by shard say first whether there is anything to look for.
WITH segments AS MATERIALIZED (
    -- A shard stands in the index once for each job that used it; the same text may have come under several licences.
    SELECT DISTINCT r.run, r.checkpoint, r.shard, i.corpus, i.license
    FROM consumption_rounds AS r
    INNER JOIN shard_index AS i USING (shard)
    WHERE
        NOT list_contains($allowed, i.license)
        AND ($run IS NULL OR r.checkpoint IN (SELECT checkpoint FROM run_ancestors($run)))
),

read AS (
    SELECT
        c.run,
        c.island,
        s.corpus,
        s.license,
        c.shard,
        c.shard_position,
        sum(c.tokens)::BIGINT AS tokens,
        min(c.step) AS first_step
    FROM consumption AS c
    INNER JOIN segments AS s USING (run, checkpoint, shard)
    -- Says nothing new, but lets the scan pass over the rows of all other shards.
    WHERE c.shard IN (SELECT shard FROM segments)
    GROUP BY ALL
),

known AS (
    SELECT DISTINCT shard, position AS shard_position, doc_id FROM shards
    WHERE shard IN (SELECT shard FROM segments)
)

SELECT r.run, r.island, r.corpus, r.license, r.shard, k.doc_id, r.tokens, r.first_step
FROM read AS r
LEFT JOIN known AS k USING (shard, shard_position)
ORDER BY r.run, r.island, r.first_step, r.shard, k.doc_id;
