-- Which documents and which batches near a step of a run stand out by their loss, or by the harm that was measured of them?
-- Parameters: run, its name; island (null: all); step; window (steps up to that one that are looked at); baseline (steps before and after these that
-- say what is usual); most (rows of each kind).
-- Columns: kind (document or batch), island, step (of a document: where it stood out most), doc_id (null for a batch), corpus, tier (of a batch: the one
-- with most tokens), tokens, loss, loss_z, contribution (to the descent of the holdout loss, per token; null: not measured), contribution_z (null likewise), score.
-- z is robust: the distance from the median, in 1.4826 median absolute deviations; of a document's span among those of its tier, of a batch among
-- its island's. A contribution's has its sign turned: positive is harm. The score is the greater of the two; rows come by it, the worst first.
WITH spans AS MATERIALIZED (
    SELECT c.island, c.step, c.shard, c.shard_position, c.tier, c.tokens, c.loss, c.contribution / c.tokens AS gain, c.step BETWEEN $step - $window + 1 AND $step AS near
    FROM consumption AS c
    INNER JOIN island_segments($run) AS a USING (run, checkpoint)
    WHERE
        c.loss IS NOT NULL
        AND c.step BETWEEN $step - $window + 1 - $baseline AND $step + $baseline
        AND ($island IS NULL OR c.island = $island)
),

batches AS (
    SELECT
        island,
        step,
        arg_max(tier, tokens) AS tier,
        sum(tokens)::BIGINT AS tokens,
        sum(loss * tokens) / sum(tokens) AS loss,
        sum(gain * tokens) / sum(tokens) FILTER (WHERE gain IS NOT NULL) AS gain,
        any_value(near) AS near
    FROM spans
    GROUP BY island, step
),

usual_spans AS (
    SELECT tier, median(loss) AS loss, 1.4826 * mad(loss) AS loss_spread, median(gain) AS gain, 1.4826 * mad(gain) AS gain_spread
    FROM spans
    GROUP BY tier
),

usual_batches AS (
    SELECT island, median(loss) AS loss, 1.4826 * mad(loss) AS loss_spread, median(gain) AS gain, 1.4826 * mad(gain) AS gain_spread
    FROM batches
    GROUP BY island
),

judged AS (
    SELECT
        'document' AS kind, s.island, s.step, s.shard, s.shard_position, s.tier, s.tokens, s.loss, s.gain,
        (s.loss - u.loss) / greatest(u.loss_spread, 1e-9) AS loss_z,
        (u.gain - s.gain) / greatest(u.gain_spread, 1e-12) AS gain_z
    FROM spans AS s
    INNER JOIN usual_spans AS u USING (tier)
    WHERE s.near
    UNION ALL
    SELECT
        'batch', b.island, b.step, NULL, NULL, b.tier, b.tokens, b.loss, b.gain,
        (b.loss - u.loss) / greatest(u.loss_spread, 1e-9),
        (u.gain - b.gain) / greatest(u.gain_spread, 1e-12)
    FROM batches AS b
    INNER JOIN usual_batches AS u USING (island)
    WHERE b.near
),

places AS (
    SELECT DISTINCT shard, position AS shard_position, doc_id FROM shards
    WHERE shard IN (SELECT shard FROM judged)
),

ranked AS (
    SELECT
        j.kind, j.island, j.step, p.doc_id, k.corpus, j.tier, j.tokens, j.loss, j.loss_z, j.gain AS contribution, j.gain_z AS contribution_z,
        greatest(j.loss_z, coalesce(j.gain_z, j.loss_z)) AS score
    FROM judged AS j
    LEFT JOIN places AS p USING (shard, shard_position)
    LEFT JOIN shard_kinds AS k USING (shard)
    -- A document may have been read in several pieces: the worst of them speaks for it.
    QUALIFY j.kind = 'batch' OR row_number() OVER (PARTITION BY j.kind, p.doc_id, j.island ORDER BY score DESC, j.step) = 1
)

SELECT *
FROM ranked
QUALIFY row_number() OVER (PARTITION BY kind ORDER BY score DESC, island, step, doc_id) <= $most
ORDER BY kind DESC, score DESC, island, step, doc_id;
