-- How did the loss of each island of a run stand before it first read a corpus, and after?
-- Parameter: run VARCHAR, its name.
-- Parameter: corpus VARCHAR, name of the corpus.
-- Columns: island, tier, first_step (when the island first read the corpus; null: never, then all is before), tokens_before, loss_before,
-- tokens_after, loss_after (mean training loss on documents of other corpora, by tier, nats per token), holdout_before, holdout_after (mean of the
-- holdout losses measured, of the island as a whole). Null where nothing was measured.
-- This is an association, not a cause: loss falls along a training anyhow, and what else changed then is not held apart. Compare islands that read the
-- corpus with islands that didn't. The segment in which the corpus was first read counts as after. For a branch, an island's steps before it are those
-- of the run that it goes on from.
WITH segments AS MATERIALIZED (
    SELECT checkpoint, island, round FROM island_segments($run)
),

sums AS (
    SELECT s.island, s.round, r.tier, k.corpus, r.first_step, r.loss_tokens, r.loss_sum
    FROM consumption_rounds AS r
    INNER JOIN segments AS s USING (checkpoint)
    INNER JOIN shard_kinds AS k USING (shard)
),

begins AS (
    SELECT island, min(first_step) AS first_step, min(round) AS round FROM sums
    WHERE corpus = $corpus
    GROUP BY island
),

training AS (
    SELECT
        s.island,
        s.tier,
        sum(s.loss_tokens) FILTER (WHERE b.round IS NULL OR s.round < b.round)::BIGINT AS tokens_before,
        sum(s.loss_sum) FILTER (WHERE b.round IS NULL OR s.round < b.round) AS sum_before,
        sum(s.loss_tokens) FILTER (WHERE s.round >= b.round)::BIGINT AS tokens_after,
        sum(s.loss_sum) FILTER (WHERE s.round >= b.round) AS sum_after
    FROM sums AS s
    LEFT JOIN begins AS b USING (island)
    WHERE s.corpus <> $corpus
    GROUP BY s.island, s.tier
),

holdout AS (
    SELECT
        s.island,
        avg(c.holdout_loss) FILTER (WHERE b.round IS NULL OR s.round < b.round) AS holdout_before,
        avg(c.holdout_loss) FILTER (WHERE s.round >= b.round) AS holdout_after
    FROM segments AS s
    INNER JOIN checkpoints AS c USING (checkpoint)
    LEFT JOIN begins AS b ON b.island = s.island
    GROUP BY s.island
)

SELECT
    t.island,
    t.tier,
    b.first_step,
    coalesce(t.tokens_before, 0) AS tokens_before,
    t.sum_before / nullif(t.tokens_before, 0) AS loss_before,
    coalesce(t.tokens_after, 0) AS tokens_after,
    t.sum_after / nullif(t.tokens_after, 0) AS loss_after,
    h.holdout_before,
    h.holdout_after
FROM training AS t
INNER JOIN holdout AS h USING (island)
LEFT JOIN begins AS b USING (island)
ORDER BY t.island, array_position(['S', 'A', 'B', 'C'], t.tier);
