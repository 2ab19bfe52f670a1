-- Which mix of the tiers should an island read next?
-- Parameter: run VARCHAR, its name.
-- Parameter: island INTEGER, its number.
-- Parameter: sequence BIGINT, number of the island's feedback message that decides; 0: there is none yet.
-- Parameter: strategy VARCHAR, its strategy.
-- Parameter: tier_version INTEGER, the tier version that it reads.
-- Parameter: pool VARCHAR, the pool that it reads from.
-- Parameter: previous DOUBLE[], weights of S, A, B, C so far; empty: it begins.
-- Parameter: effectiveness DOUBLE[], what S, A, B, C are worth by all that is known of the run (trainer/worth.py); empty: what the message says of each.
-- Parameter: error DOUBLE[], their standard errors; empty with it.
-- Columns: tier, weight, tokens (in the tier's view), start (weight that the strategy starts with), effectiveness (where it counts), error, ratio.
-- A strategy with a learning rate moves by multiplicative weights (Hedge; Freund and Schapire, 1997): w ← w · exp(η · (u − mean u) / s), each ratio held
-- within 1 ± step_cap, then floored and normalised. u is the effectiveness plus `exploration` times its error: who is less known is tried more. s² is the
-- variance of the effectiveness between the tiers plus the mean square of its errors: what moves a mix is certainty, whatever the unit, and noise moves it
-- little. A tier that was not tried keeps its weight; one of weight 0 is never tried. Without a learning rate the weights are the strategy's own, as the
-- table says now. The weights of a tier without documents go to the others when it's streamed.
WITH sizes AS (
    SELECT s.tier, sum(s.tokens) AS tokens
    FROM view_shards AS s
    INNER JOIN views AS v USING (tier_version, pool, tier, job)
    WHERE s.tier_version = $tier_version AND s.pool = $pool
    GROUP BY s.tier
),

told AS (
    SELECT
        unnest(['S', 'A', 'B', 'C']) AS tier,
        unnest([effectiveness_s, effectiveness_a, effectiveness_b, effectiveness_c]) AS effectiveness,
        unnest([effectiveness_error_s, effectiveness_error_a, effectiveness_error_b, effectiveness_error_c]) AS error
    FROM feedback
    WHERE run = $run AND island = $island AND sequence = $sequence AND len($effectiveness::DOUBLE []) = 0
    UNION ALL
    SELECT
        unnest(['S', 'A', 'B', 'C']) AS tier,
        unnest($effectiveness::DOUBLE []) AS effectiveness,
        unnest($error::DOUBLE []) AS error
    WHERE len($effectiveness::DOUBLE []) > 0
),

asked AS (
    SELECT
        learning_rate,
        weight_floor,
        step_cap,
        coalesce(exploration, 0) AS exploration,
        unnest(['S', 'A', 'B', 'C']) AS tier,
        unnest([1, 2, 3, 4]) AS place,
        unnest([weight_s, weight_a, weight_b, weight_c]) AS weight
    FROM strategies
    WHERE strategy = $strategy
),

facts AS (
    SELECT
        a.*,
        coalesce(z.tokens, 0)::BIGINT AS tokens,
        coalesce(a.weight, z.tokens / sum(z.tokens) OVER (), 0)::DOUBLE AS start,
        list_extract($previous::DOUBLE [], a.place) AS previous,
        -- Errors aren't known in rows of before there were any.
        coalesce(t.error, 0) AS error,
        CASE
            WHEN isfinite(t.effectiveness) AND isfinite(coalesce(t.error, 0)) AND list_extract($previous::DOUBLE [], a.place) > 0
                THEN t.effectiveness
        END AS effectiveness
    FROM asked AS a
    LEFT JOIN sizes AS z USING (tier)
    LEFT JOIN told AS t USING (tier)
),

scaled AS (
    SELECT
        *,
        effectiveness + exploration * error AS hoped,
        sqrt(
            var_pop(effectiveness) OVER () + avg(error * error) FILTER (WHERE effectiveness IS NOT NULL) OVER ()
        ) AS scale
    FROM facts
),

moved AS (
    SELECT
        *,
        CASE
            WHEN effectiveness IS NOT NULL AND count(effectiveness) OVER () >= 2 AND scale > 0
                THEN least(greatest(exp(learning_rate * (hoped - avg(hoped) OVER ()) / scale), 1 - step_cap), 1 + step_cap)
            ELSE 1
        END AS ratio
    FROM scaled
),

weighed AS (
    SELECT
        *,
        CASE
            WHEN previous IS NULL OR learning_rate = 0 THEN start
            WHEN previous = 0 THEN 0
            WHEN count(effectiveness) OVER () < 2 THEN previous
            ELSE greatest(previous * ratio, weight_floor)
        END AS unscaled
    FROM moved
)

SELECT
    tier,
    unscaled / nullif(sum(unscaled) OVER (), 0) AS weight,
    tokens,
    start,
    effectiveness,
    error,
    ratio
FROM weighed
ORDER BY place;
