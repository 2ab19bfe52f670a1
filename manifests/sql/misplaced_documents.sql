-- Documents of a tier version that don't stand once in the view of their tier. A row for each.
-- $version: tier version; $pool: name of the pool. `holdout` counts as a tier.
WITH members AS (
    SELECT shard, tier
    FROM view_shards
    JOIN views USING (tier_version, pool, tier, job)
    WHERE tier_version = $version AND pool = $pool
),
shown AS (
    SELECT s.doc_id, members.tier, any_value(s.shard) AS shard, any_value(s.position) AS position, count(*) AS times
    FROM (SELECT DISTINCT shard, position, doc_id, tokens FROM shards) AS s
    JOIN members USING (shard)
    WHERE s.tokens > 0
    GROUP BY ALL
),
said AS (
    SELECT doc_id, tier FROM tiers WHERE tier_version = $version AND doc_id IN (SELECT doc_id FROM documents)
    UNION ALL
    SELECT DISTINCT doc_id, 'holdout' FROM documents WHERE split = 'holdout'
)
SELECT
    coalesce(shown.doc_id, said.doc_id) AS doc_id,
    shown.shard,
    shown.position,
    CASE
        WHEN shown.doc_id IS NULL THEN 'of tier ' || said.tier || ' stand in no view'
        WHEN said.doc_id IS NULL THEN 'stand in the view of tier ' || shown.tier || ', and the tier version says otherwise'
        ELSE 'stand several times in the view of tier ' || shown.tier
    END AS finding
FROM shown
FULL JOIN said ON said.doc_id = shown.doc_id AND said.tier = shown.tier
WHERE shown.doc_id IS NULL OR said.doc_id IS NULL OR shown.times > 1
ORDER BY finding, doc_id
