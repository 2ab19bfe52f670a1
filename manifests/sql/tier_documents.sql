-- Which documents have a score?
-- Parameter: jobs, the score jobs that count.
-- Columns: doc_id, corpus; in the order of doc_id.
SELECT doc_id, corpus
FROM documents
WHERE doc_id IN (SELECT doc_id FROM influence WHERE list_contains($jobs, job) AND isfinite(score))
ORDER BY doc_id;
