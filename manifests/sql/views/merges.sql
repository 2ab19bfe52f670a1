-- Which outer gradients went into which version of a fragment?
-- One row for each outer gradient of each merge: run, merge (number in the run, from 1), fragment, version, island, checkpoint (the island's
-- checkpoint that it was sent after), base_version, tokens, steps, weight, written_at.
CREATE VIEW merges AS
SELECT
    run,
    merge,
    fragment,
    version,
    sent.island,
    unhex(sent.checkpoint) AS checkpoint,
    sent.base_version,
    sent.tokens,
    sent.steps,
    sent.weight,
    written_at
FROM (
    -- The detail of a merge is long: it is parsed once, not once for each outer gradient.
    SELECT run, said.merge, fragment, version, unnest(said.contributions) AS sent, written_at
    FROM (
        SELECT *, from_json(detail, '{
            "merge": "INTEGER",
            "contributions": [{
                "island": "INTEGER", "checkpoint": "VARCHAR", "base_version": "INTEGER", "tokens": "BIGINT", "steps": "BIGINT", "weight": "DOUBLE"
            }]
        }') AS said
        FROM events
        WHERE kind = 'merge'
    )
);
