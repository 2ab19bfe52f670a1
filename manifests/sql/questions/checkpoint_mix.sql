-- Which corpora, tiers, licences and generators made a checkpoint?
-- Parameter: checkpoint BLOB, the id of an island's or a global checkpoint.
-- Columns: corpus, origin, generator, prompt, license, tier, spans, tokens, share (of all tokens).
SELECT
    k.corpus,
    k.origin,
    k.generator,
    k.prompt,
    k.license,
    r.tier,
    sum(r.spans)::BIGINT AS spans,
    sum(r.tokens)::BIGINT AS tokens,
    sum(r.tokens) / sum(sum(r.tokens)) OVER () AS share
FROM consumption_rounds AS r
INNER JOIN ancestors($checkpoint) AS a USING (checkpoint)
INNER JOIN shard_kinds AS k USING (shard)
GROUP BY ALL
ORDER BY tokens DESC, corpus, tier;
