-- Where did a tier version put the documents, by planted label where the sources carry one?
-- Parameter: tier_version, its number.
-- Columns: tier, documents, share_of_documents, tokens (by the pool where the documents are sharded, else null), text_bytes, share_of_influence
-- (of the positive influence in all), label_shares (map: label → share of that label's documents that are in this tier).
WITH tiered AS (
    SELECT t.tier, t.score, d.doc_id, d.text_bytes, d.label
    FROM tiers AS t
    INNER JOIN documents AS d USING (doc_id)
    WHERE t.tier_version = $tier_version
),

sized AS (
    SELECT doc_id, any_value(tokens) AS tokens
    FROM shards
    GROUP BY doc_id
),

labels AS (
    SELECT label, count(*) AS documents
    FROM tiered
    WHERE label IS NOT NULL
    GROUP BY label
),

label_shares AS (
    SELECT tier, map_from_entries(list((label, share) ORDER BY label)) AS label_shares
    FROM (
        SELECT t.tier, t.label, count(*) / any_value(l.documents) AS share
        FROM tiered AS t
        INNER JOIN labels AS l USING (label)
        GROUP BY t.tier, t.label
    )
    GROUP BY tier
)

SELECT
    t.tier,
    count(*) AS documents,
    count(*) / sum(count(*)) OVER () AS share_of_documents,
    sum(s.tokens)::BIGINT AS tokens,
    sum(t.text_bytes)::BIGINT AS text_bytes,
    coalesce(sum(greatest(t.score, 0)) / nullif(sum(sum(greatest(t.score, 0))) OVER (), 0), 0) AS share_of_influence,
    any_value(p.label_shares) AS label_shares
FROM tiered AS t
LEFT JOIN sized AS s USING (doc_id)
LEFT JOIN label_shares AS p USING (tier)
GROUP BY t.tier
ORDER BY array_position(['S', 'A', 'B', 'C'], t.tier);
