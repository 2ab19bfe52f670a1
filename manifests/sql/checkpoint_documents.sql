-- Which corpora and tiers made a checkpoint?
-- Parameter: checkpoint, the id of an island's or a global checkpoint (BLOB).
-- Columns: corpus, origin, tier, documents (distinct), tokens, share (of all tokens).
-- A checkpoint was made by its own segment, by its parents', and by all that had gone into the fragments that it had seen.
WITH RECURSIVE ancestry (checkpoint) AS (
    SELECT unnest(CASE WHEN island = -1 THEN merged ELSE [checkpoint] END)
    FROM checkpoints
    WHERE checkpoint = $checkpoint
    UNION
    SELECT unnest(list_concat(
        CASE WHEN c.parent IS NULL THEN []::BLOB [] ELSE [c.parent] END,
        coalesce((
            SELECT list(m.checkpoint)
            FROM merges AS m
            WHERE m.run = c.run AND m.version <= c.clock[m.fragment + 1]
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
