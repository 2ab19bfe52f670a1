-- Which documents were read again and again in a run?
-- Parameter: run VARCHAR, its name.
-- Parameter: times INTEGER = 3, only documents that were read more often than this.
-- Columns: doc_id, corpus, tier (the one that most of its tokens were read in), times (how often its first token was read, by all islands together),
-- tokens (that were read of it), document_tokens (its length).
-- A document that is cut at a sequence's end goes on in the next one: so the beginnings are counted, not the spans. For a branch, what the run before
-- it brought in counts too.
WITH read AS (
    SELECT
        c.shard,
        c.shard_position,
        c.tier,
        count(*) FILTER (WHERE c.token_start = 0) AS times,
        sum(c.tokens)::BIGINT AS tokens
    FROM consumption AS c
    INNER JOIN run_ancestors($run) AS a USING (run, checkpoint)
    GROUP BY ALL
),

known AS (
    SELECT DISTINCT shard, position AS shard_position, doc_id, tokens AS document_tokens FROM shards
    WHERE shard IN (SELECT shard FROM read)
)

SELECT
    k.doc_id,
    any_value(s.corpus) AS corpus,
    arg_max(r.tier, r.tokens) AS tier,
    sum(r.times)::BIGINT AS times,
    sum(r.tokens)::BIGINT AS tokens,
    any_value(k.document_tokens) AS document_tokens
FROM read AS r
INNER JOIN known AS k USING (shard, shard_position)
INNER JOIN shard_kinds AS s USING (shard)
GROUP BY k.doc_id
HAVING sum(r.times) > $times
ORDER BY times DESC, tokens DESC, k.doc_id;
