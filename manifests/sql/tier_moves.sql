-- How many documents does a tier version that isn't committed yet move from one tier to another? (`tier_changes` says it of committed ones, by corpus.)
-- Parameters: before, number of the earlier version; after, number of the new one; job, the job that makes it.
-- Columns: tier_before, tier_after (null: not in that version), documents. Those that stay are counted too.
WITH earlier AS (
    SELECT doc_id, tier
    FROM tiers
    WHERE tier_version = $before
),

later AS (
    SELECT doc_id, tier
    FROM raw.tiers
    WHERE tier_version = $after AND job = $job
)

SELECT e.tier AS tier_before, l.tier AS tier_after, count(*) AS documents
FROM earlier AS e
FULL JOIN later AS l ON l.doc_id = e.doc_id
GROUP BY e.tier, l.tier
ORDER BY array_position(['S', 'A', 'B', 'C'], e.tier), array_position(['S', 'A', 'B', 'C'], l.tier);
