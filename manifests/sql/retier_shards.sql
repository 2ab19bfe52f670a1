-- Where the documents of a tier version's views stand in another tier version. A row for each shard and each pair of tiers.
-- $base, $version: tier versions; $pool: name of the pool.
-- tier_after is null for documents that are in no tier any more: forgotten, or not scored.
WITH base AS (
    SELECT shard, tier AS tier_before
    FROM view_shards
    JOIN views USING (tier_version, pool, tier, job)
    WHERE tier_version = $base AND pool = $pool
),
places AS (
    SELECT DISTINCT shard, position, doc_id FROM shards WHERE shard IN (SELECT shard FROM base)
),
now AS (
    SELECT doc_id, tier, score FROM tiers WHERE tier_version = $version AND doc_id IN (SELECT doc_id FROM documents)
    UNION ALL
    SELECT DISTINCT doc_id, 'holdout', NULL FROM documents WHERE split = 'holdout'
)
SELECT
    base.tier_before,
    places.shard,
    now.tier AS tier_after,
    count(*) AS documents,
    coalesce(max(now.score), 0.0) AS score_high
FROM places
JOIN base USING (shard)
LEFT JOIN now USING (doc_id)
GROUP BY ALL
ORDER BY base.tier_before, places.shard, tier_after
