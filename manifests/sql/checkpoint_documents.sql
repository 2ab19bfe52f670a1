-- Which corpora and tiers made a checkpoint?
-- Parameter: checkpoint, the id of an island's or a global checkpoint (BLOB).
-- Columns: corpus, origin, tier, documents (distinct), tokens, share (of all tokens).
-- A checkpoint was made by its own segment, by its parents', and by all that had gone into the fragments that it had seen: those merged in its
-- run, and in the runs that this one branches from up to the merge where it does.
WITH RECURSIVE lineage (run, ancestor, last_merge) AS (
    SELECT run, run, 2147483647 FROM runs
    UNION ALL
    SELECT l.run, r.parent_run, least(l.last_merge, (r.branch::JSON ->> 'merge')::INTEGER)
    FROM lineage AS l
    INNER JOIN runs AS r ON r.run = l.ancestor
    WHERE r.parent_run IS NOT NULL
),

ancestry (checkpoint) AS (
    SELECT unnest(CASE WHEN island = -1 THEN merged ELSE [checkpoint] END)
    FROM checkpoints
    WHERE checkpoint = $checkpoint
    UNION
    SELECT unnest(list_concat(
        CASE WHEN c.parent IS NULL THEN []::BLOB [] ELSE [c.parent] END,
        coalesce((
            SELECT list(m.checkpoint)
            FROM merges AS m
            INNER JOIN lineage AS l ON l.ancestor = m.run AND m.merge <= l.last_merge
            WHERE l.run = c.run AND m.version <= c.clock[m.fragment + 1]
        ), []::BLOB [])
    ))
    FROM checkpoints AS c
    INNER JOIN ancestry USING (checkpoint)
)

SELECT
    d.corpus,
    c.origin,
    c.tier,
    count(DISTINCT c.doc_id) AS documents,
    sum(c.tokens)::BIGINT AS tokens,
    sum(c.tokens) / sum(sum(c.tokens)) OVER () AS share
FROM consumption AS c
INNER JOIN ancestry USING (checkpoint)
INNER JOIN documents AS d USING (doc_id)
GROUP BY ALL
ORDER BY tokens DESC, corpus, tier;
