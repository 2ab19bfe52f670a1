-- Which outer gradients went into which version of a fragment?
-- One row for each outer gradient of each merge: run, merge (number in the run, from 1), fragment, version, island, checkpoint (the island's
-- checkpoint that it was sent after), base_version, tokens, steps, weight, written_at.
CREATE VIEW merges AS
SELECT
    run,
    (detail::JSON ->> 'merge')::INTEGER AS merge,
    fragment,
    version,
    (contribution ->> 'island')::INTEGER AS island,
    unhex(contribution ->> 'checkpoint') AS checkpoint,
    (contribution ->> 'base_version')::INTEGER AS base_version,
    (contribution ->> 'tokens')::BIGINT AS tokens,
    (contribution ->> 'steps')::BIGINT AS steps,
    (contribution ->> 'weight')::DOUBLE AS weight,
    written_at
FROM (
    SELECT *, unnest((detail::JSON -> 'contributions')::JSON []) AS contribution
    FROM events
    WHERE kind = 'merge'
);
