-- Which versions of tables does a decision on a mix, or a job, say that it was computed from?
-- Columns: name (of a table; or whatever else a job counts among its inputs by a number), version.
WITH computed AS (
    SELECT inputs FROM mixtures
    UNION ALL
    SELECT inputs FROM jobs
)

SELECT DISTINCT e.key AS name, (e.value ->> '$')::BIGINT AS version
FROM computed AS c, json_each(c.inputs::JSON) AS e
WHERE e.type IN ('UBIGINT', 'BIGINT');
