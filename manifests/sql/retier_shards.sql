-- Where the documents of a tier version's views stand in another tier version. A row for each shard and each pair of tiers.
-- $base, $version: tier versions; $pool: name of the pool.
-- tier_after is null for documents that are in no tier any more: forgotten, or not scored. shard and tier_before are null for documents that stand in none of the views.
WITH base AS (
    SELECT shard, any_value(view_shards.tier) AS tier_before, min(shard_index.job) AS job, row_number() OVER (ORDER BY shard) AS number
    FROM view_shards
    JOIN views USING (tier_version, pool, tier, job)
    JOIN shard_index USING (shard)
    WHERE view_shards.tier_version = $base AND view_shards.pool = $pool
    GROUP BY shard
),
-- A shard that several jobs have written has its rows several times: those of one are enough.
places AS (
    SELECT number, doc_id FROM shards JOIN base USING (shard, job)
),
-- A tier version's documents exist, unless they were forgotten since.
now AS (
    SELECT doc_id, tier, score FROM tiers WHERE tier_version = $version AND doc_id NOT IN (SELECT doc_id FROM tombstones)
    UNION ALL
    SELECT DISTINCT doc_id, 'holdout', NULL FROM documents WHERE split = 'holdout'
),
counted AS (
    SELECT number, tier AS tier_after, count(*) AS documents, coalesce(max(score), 0.0) AS score_high
    FROM places
    FULL JOIN now USING (doc_id)
    GROUP BY ALL
)
SELECT tier_before, shard, tier_after, documents, score_high
FROM counted
LEFT JOIN base USING (number)
ORDER BY tier_before, shard, tier_after
