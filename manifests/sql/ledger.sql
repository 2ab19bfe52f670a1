-- What does the consumption table say that the islands of a global checkpoint trained on, each from its first step to what was merged of it?
-- Parameter: checkpoint, the id of a global checkpoint (BLOB).
-- Columns: tier, tokens.
-- To be held against the islands' own counters. It differs from checkpoint_mix on a branch, whose fragments also hold what islands did
-- after the point that they were set back to.
WITH RECURSIVE chain (checkpoint) AS (
    SELECT unnest(merged) FROM checkpoints WHERE checkpoint = $checkpoint
    UNION
    SELECT c.parent FROM checkpoints AS c
    INNER JOIN chain USING (checkpoint)
    WHERE c.parent IS NOT NULL
)

SELECT tier, sum(tokens)::BIGINT AS tokens
FROM consumption
INNER JOIN chain USING (checkpoint)
GROUP BY tier
ORDER BY tier;
