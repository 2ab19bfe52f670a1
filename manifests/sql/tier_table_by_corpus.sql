-- Where did a tier version put the documents of each corpus?
-- Parameter: tier_version, its number.
-- Columns: corpus, tier, documents, share_of_corpus (of the documents of this corpus), tokens (by the pool where the documents are sharded, else null),
-- share_of_influence (of the positive influence in all corpora), mean_score.
WITH tiered AS (
    SELECT t.tier, t.score, d.doc_id, d.corpus
    FROM tiers AS t
    INNER JOIN documents AS d USING (doc_id)
    WHERE t.tier_version = $tier_version
),

sized AS (
    SELECT doc_id, any_value(tokens) AS tokens
    FROM shards
    GROUP BY doc_id
)

SELECT
    t.corpus,
    t.tier,
    count(*) AS documents,
    count(*) / sum(count(*)) OVER (PARTITION BY t.corpus) AS share_of_corpus,
    sum(s.tokens)::BIGINT AS tokens,
    coalesce(sum(greatest(t.score, 0)) / nullif(sum(sum(greatest(t.score, 0))) OVER (), 0), 0) AS share_of_influence,
    avg(t.score) AS mean_score
FROM tiered AS t
LEFT JOIN sized AS s USING (doc_id)
GROUP BY t.corpus, t.tier
ORDER BY t.corpus, array_position(['S', 'A', 'B', 'C'], t.tier);
