-- Which documents moved from one tier to another between two tier versions?
-- Parameter: before INTEGER, number of the earlier tier version.
-- Parameter: after INTEGER, number of the later one.
-- Columns: tier_before, tier_after (null: not in that version), corpus (null: the document is forgotten), documents. Those that stayed are left out.
WITH earlier AS (
    SELECT doc_id, tier FROM tiers
    WHERE tier_version = $before
),

later AS (
    SELECT doc_id, tier FROM tiers
    WHERE tier_version = $after
)

SELECT e.tier AS tier_before, l.tier AS tier_after, d.corpus, count(*) AS documents
FROM earlier AS e
FULL JOIN later AS l ON l.doc_id = e.doc_id
LEFT JOIN documents AS d ON d.doc_id = coalesce(l.doc_id, e.doc_id)
WHERE e.tier IS DISTINCT FROM l.tier
GROUP BY ALL
ORDER BY documents DESC, tier_before, tier_after, corpus;
