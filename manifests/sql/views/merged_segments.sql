-- Which segments of which islands went into the fragments that a run reads?
-- One row for each outer gradient of each merge, for each run that reads its result: reader (that run), fragment, version, and checkpoint, run, island,
-- round of the segment that it was sent after. A branch reads what was merged in the run before it up to the merge where it branches off.
CREATE VIEW merged_segments AS
WITH RECURSIVE lineage (run, ancestor, last_merge) AS (
    SELECT run, run, 2147483647 FROM runs
    UNION ALL
    SELECT l.run, r.parent_run, least(l.last_merge, (r.branch::JSON ->> 'merge')::INTEGER)
    FROM lineage AS l
    INNER JOIN runs AS r ON r.run = l.ancestor
    WHERE r.parent_run IS NOT NULL
)

SELECT l.run AS reader, m.fragment, m.version, c.checkpoint, c.run, c.island, c.round
FROM merges AS m
INNER JOIN lineage AS l ON l.ancestor = m.run AND m.merge <= l.last_merge
INNER JOIN checkpoints AS c ON c.checkpoint = m.checkpoint;
