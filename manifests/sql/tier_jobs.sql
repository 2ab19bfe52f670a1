-- Which score jobs are there, the newest first?
-- Columns: job, method (of its scores; null where it has none that may be read), num_folds (that its standard errors rest on; null: they were made in another way),
-- base (of a distilled scorer: the job whose direct scores it completes, else null).
SELECT
    j.job,
    i.method,
    (j.config->>'$.num_folds')::INTEGER AS num_folds,
    CASE
        WHEN i.method LIKE 'distilled%' THEN coalesce(j.inputs->>'$.base', j.config->>'$.base')
    END AS base
FROM jobs AS j
LEFT JOIN (SELECT job, min(method) AS method FROM influence GROUP BY job) AS i USING (job)
WHERE j.kind = 'score'
ORDER BY j.written_at DESC, j.job;
