-- What does one estimator say of each document that has a score?
-- Parameters: jobs, all score jobs that count; base, the job of this estimator; completion, the job of the distilled scorer that completes it, or null.
-- Columns: score, stderr (null where this estimator has none), direct (false: predicted, or none), completed (by the distilled scorer); one row for each of
-- tier_documents.sql, in its order.
WITH measured AS (
    SELECT doc_id, score, stderr, direct
    FROM influence
    WHERE job = $base AND isfinite(score)
),

own AS (
    SELECT *, false AS completed
    FROM measured
    UNION ALL
    -- A document that was measured keeps what was measured.
    SELECT doc_id, score, stderr, direct, true AS completed
    FROM influence
    WHERE job = $completion AND isfinite(score) AND doc_id NOT IN (SELECT doc_id FROM measured)
)

SELECT o.score, o.stderr, coalesce(o.direct, false) AS direct, coalesce(o.completed, false) AS completed
FROM documents AS d
LEFT JOIN own AS o USING (doc_id)
WHERE d.doc_id IN (SELECT doc_id FROM influence WHERE list_contains($jobs, job) AND isfinite(score))
ORDER BY d.doc_id;
