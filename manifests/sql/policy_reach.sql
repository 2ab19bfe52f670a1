-- Which labels do the documents carry, and how much is there of each?
-- Columns: license, access, documents, tokens (in the pool; null: none of them is sharded yet).
WITH sized AS (
    SELECT doc_id, any_value(tokens) AS tokens
    FROM shards
    GROUP BY doc_id
)

SELECT d.license, d.access, count(*) AS documents, sum(s.tokens)::BIGINT AS tokens
FROM documents AS d
LEFT JOIN sized AS s USING (doc_id)
GROUP BY d.license, d.access
ORDER BY documents DESC, d.license, d.access;
