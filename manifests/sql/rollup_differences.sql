-- Where does consumption_rounds say something else than consumption adds up to?
-- Columns: checkpoint, shard, tier, and spans, tokens, loss_tokens, loss_sum as consumption has them, said_spans, said_tokens, said_loss_tokens,
-- said_loss_sum as consumption_rounds has them; 0 where one of the two has nothing. No rows where they agree.
-- Sums of losses may differ in their last digits: they were added up in another order.
WITH summed AS (
    SELECT
        checkpoint,
        shard,
        tier,
        count(*) AS spans,
        sum(tokens)::BIGINT AS tokens,
        coalesce(sum(tokens) FILTER (WHERE loss IS NOT NULL), 0)::BIGINT AS loss_tokens,
        coalesce(sum(tokens * loss::DOUBLE), 0) AS loss_sum
    FROM consumption
    GROUP BY checkpoint, shard, tier
),

said AS (
    SELECT
        checkpoint,
        shard,
        tier,
        sum(spans)::BIGINT AS spans,
        sum(tokens)::BIGINT AS tokens,
        sum(loss_tokens)::BIGINT AS loss_tokens,
        sum(loss_sum) AS loss_sum
    FROM consumption_rounds
    GROUP BY checkpoint, shard, tier
),

compared AS (
    SELECT
        checkpoint,
        shard,
        tier,
        coalesce(a.spans, 0) AS spans,
        coalesce(a.tokens, 0) AS tokens,
        coalesce(a.loss_tokens, 0) AS loss_tokens,
        coalesce(a.loss_sum, 0) AS loss_sum,
        coalesce(b.spans, 0) AS said_spans,
        coalesce(b.tokens, 0) AS said_tokens,
        coalesce(b.loss_tokens, 0) AS said_loss_tokens,
        coalesce(b.loss_sum, 0) AS said_loss_sum
    FROM summed AS a
    FULL JOIN said AS b USING (checkpoint, shard, tier)
)

SELECT *
FROM compared
WHERE
    (spans, tokens, loss_tokens) <> (said_spans, said_tokens, said_loss_tokens)
    OR (loss_sum <> said_loss_sum AND NOT abs(loss_sum - said_loss_sum) <= 1e-9 * greatest(abs(loss_sum), abs(said_loss_sum)))
ORDER BY checkpoint, shard, tier;
