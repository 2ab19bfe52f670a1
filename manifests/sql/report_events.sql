-- What happened in a run, when, and to whom?
-- Parameters: run, its name; points, the most merges that are listed: where there are more, every n-th.
-- Columns: written_at, kind, island (-1: the syncer), detail. A merge is a row for every island that it took something from.
WITH numbered AS (
    SELECT *, max(merge) OVER () AS merges
    FROM merges
    WHERE run = $run
)

SELECT written_at, kind, coalesce(island, -1) AS island, detail
FROM events
WHERE run = $run AND kind <> 'merge'
UNION ALL
SELECT written_at, 'merge', island, format('merge {}: fragment {} becomes version {}', merge, fragment, version)
FROM numbered
WHERE merge % ceil(merges / $points)::BIGINT = 0
ORDER BY written_at, kind, island;
