-- What does each document of the train split contribute per token, by what a run measured as it trained, and how sure is that?
-- Parameters: run (its name), window (inner steps of an island that share a scale; 0: contributions as they are), prior (observations that the pooled
-- variance counts for beside a document's own), least (degrees of freedom that the pooled variance needs).
-- Columns: doc_id, score, stderr, observations, tokens (that were measured).
-- An observation is what a document contributed in one step of one island. Its contribution per token is divided by the root mean square of that over all
-- observations of the window: contributions shrink tenfold and more along a training, and documents that were read at other times couldn't be compared.
-- The variance of an observation is taken as that of a token over its tokens. A document's own variance between its observations is held together with the
-- pooled one, so most documents, which are seen once, have the pooled one alone; and where too few are seen again, that is the mean square about zero.
WITH observations AS MATERIALIZED (
    SELECT
        c.doc_id,
        c.run,
        c.island,
        CASE WHEN $window > 0 THEN (c.step - 1) // $window ELSE 0 END AS part,
        sum(c.tokens)::DOUBLE AS tokens,
        sum(c.contribution::DOUBLE) AS contribution
    FROM consumption AS c
    INNER JOIN island_segments($run) AS a USING (run, checkpoint)
    WHERE isfinite(c.contribution) AND c.doc_id IN (SELECT doc_id FROM documents WHERE split = 'train')
    GROUP BY c.doc_id, c.run, c.island, c.step
),

scales AS (
    SELECT
        run,
        island,
        part,
        CASE WHEN $window > 0 THEN sqrt(sum(contribution * contribution / tokens) / sum(tokens)) ELSE 1 END AS scale
    FROM observations
    GROUP BY run, island, part
),

sums AS MATERIALIZED (
    SELECT
        o.doc_id,
        count(*) AS observations,
        sum(o.tokens) AS tokens,
        sum(o.contribution / s.scale) AS contribution,
        sum(o.contribution * o.contribution / (o.tokens * s.scale * s.scale)) AS squares
    FROM observations AS o
    INNER JOIN scales AS s USING (run, island, part)
    WHERE s.scale > 0
    GROUP BY o.doc_id
),

spreads AS (
    SELECT *, greatest(squares - contribution * contribution / tokens, 0) AS spread FROM sums
),

pooled AS (
    SELECT
        CASE
            WHEN sum(observations - 1) >= $least
                THEN sum(spread) FILTER (WHERE observations > 1) / sum(observations - 1)
            ELSE sum(squares) / sum(observations)
        END AS variance
    FROM spreads
)

SELECT
    s.doc_id,
    s.contribution / s.tokens AS score,
    sqrt((s.spread + $prior * p.variance) / (s.observations - 1 + $prior) / s.tokens) AS stderr,
    s.observations,
    s.tokens::BIGINT AS tokens
FROM spreads AS s
CROSS JOIN pooled AS p
ORDER BY s.doc_id;
