-- Of what a tier version has in its tiers, how much was in the same tier in each other version?
-- Parameter: tier_version INTEGER, the tier version.
-- Parameter: pool VARCHAR, the pool.
-- Columns: tier_version (the other), kept (share of the tokens, of the tier of which it's least; by whole shards, so that one with a document that moved counts as new).
WITH viewed AS (
    SELECT s.tier_version, s.tier, s.shard, s.tokens
    FROM view_shards AS s
    INNER JOIN views AS v USING (tier_version, pool, tier, job)
    WHERE s.pool = $pool AND s.tier IN ('S', 'A', 'B', 'C')
),

present AS (
    SELECT tier, shard, tokens, sum(tokens) OVER (PARTITION BY tier) AS total
    FROM viewed
    WHERE tier_version = $tier_version
),

kept AS (
    SELECT o.tier_version, p.tier, sum(CASE WHEN v.shard IS NULL THEN 0 ELSE p.tokens END) / any_value(p.total) AS share
    FROM (SELECT DISTINCT tier_version FROM viewed) AS o
    CROSS JOIN present AS p
    LEFT JOIN viewed AS v ON v.tier_version = o.tier_version AND v.tier = p.tier AND v.shard = p.shard
    GROUP BY o.tier_version, p.tier
)

SELECT tier_version, min(share) AS kept
FROM kept
GROUP BY tier_version
ORDER BY tier_version;
