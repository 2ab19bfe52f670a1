-- Which documents did one island of a run read that another one didn't?
-- Parameter: run VARCHAR, its name.
-- Parameter: island INTEGER, number of the island that read them.
-- Parameter: other INTEGER, number of the island that didn't.
-- Columns: doc_id, corpus, tier (the one that most of its tokens were read in), tokens, first_step (of the island that read it).
-- What an island read itself, not what came to it with merged fragments. For a branch, an island's steps before it are those of the run that it goes on
-- from.
WITH read AS (
    SELECT c.island, c.shard, c.shard_position, c.tier, sum(c.tokens)::BIGINT AS tokens, min(c.step) AS first_step
    FROM consumption AS c
    INNER JOIN island_segments($run) AS a USING (run, checkpoint)
    WHERE c.island IN ($island, $other)
    GROUP BY ALL
),

known AS (
    SELECT DISTINCT shard, position AS shard_position, doc_id FROM shards
    WHERE shard IN (SELECT shard FROM read)
),

documents_read AS (
    SELECT r.*, k.doc_id, s.corpus
    FROM read AS r
    INNER JOIN known AS k USING (shard, shard_position)
    INNER JOIN shard_kinds AS s USING (shard)
)

SELECT
    doc_id,
    any_value(corpus) AS corpus,
    arg_max(tier, tokens) AS tier,
    sum(tokens)::BIGINT AS tokens,
    min(first_step) AS first_step
FROM documents_read
WHERE
    island = $island
    AND doc_id NOT IN (SELECT doc_id FROM documents_read WHERE island = $other)
GROUP BY doc_id
ORDER BY first_step, doc_id;
