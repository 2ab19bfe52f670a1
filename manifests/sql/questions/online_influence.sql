-- What did each tier, corpus and origin contribute to the descent of a run's holdout loss?
-- Parameter: run VARCHAR, its name.
-- Columns: tier, corpus, origin, tokens (that were read), measured_tokens (those whose contribution was measured), contribution (sum over these: drop of
-- the holdout loss that their gradients promised, nats per token of the holdout), per_million (contribution of a million measured tokens),
-- negative_share (share of the measured tokens in spans that contributed less than nothing).
-- A run measures it where it is trained with --online-influence: to first order, and in the layers that it attributes only. All islands together, so what
-- they promise is more than the merged model can keep. For a branch, an island's steps before it are those of the run that it goes on from.
WITH sums AS (
    SELECT
        c.tier,
        c.shard,
        sum(c.tokens) AS tokens,
        sum(c.tokens) FILTER (WHERE c.contribution IS NOT NULL) AS measured_tokens,
        sum(c.contribution::DOUBLE) AS contribution,
        sum(c.tokens) FILTER (WHERE c.contribution < 0) AS negative_tokens
    FROM consumption AS c
    INNER JOIN island_segments($run) AS a USING (run, checkpoint)
    GROUP BY c.tier, c.shard
)

SELECT
    s.tier,
    k.corpus,
    k.origin,
    sum(s.tokens)::BIGINT AS tokens,
    coalesce(sum(s.measured_tokens), 0)::BIGINT AS measured_tokens,
    sum(s.contribution) AS contribution,
    1e6 * sum(s.contribution) / sum(s.measured_tokens) AS per_million,
    coalesce(sum(s.negative_tokens), 0) / sum(s.measured_tokens) AS negative_share
FROM sums AS s
INNER JOIN shard_kinds AS k USING (shard)
GROUP BY s.tier, k.corpus, k.origin
ORDER BY array_position(['S', 'A', 'B', 'C'], s.tier), k.corpus, k.origin;
