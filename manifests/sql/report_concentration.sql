-- How few documents carry how much of the positive influence?
-- Parameters: tier_version, its number; points, about how many rows.
-- Columns: documents (share of all, the most influential first), influence (share of the positive influence that they carry), tier (of the
-- row's last document). No rows where nothing has positive influence.
WITH ranked AS (
    SELECT
        tier,
        greatest(score, 0) AS gain,
        row_number() OVER (ORDER BY score DESC, doc_id) AS place,
        count(*) OVER () AS documents,
        sum(greatest(score, 0)) OVER () AS total
    FROM tiers
    WHERE tier_version = $tier_version
),

running AS (
    SELECT *, sum(gain) OVER (ORDER BY place) AS gained
    FROM ranked
    WHERE total > 0
)

SELECT place / documents AS documents, gained / total AS influence, tier
FROM running
WHERE place % ceil(documents / $points)::BIGINT = 0 OR place IN (1, documents)
ORDER BY place;
