-- How did the training loss of a run go, by tier and corpus?
-- Parameter: run VARCHAR, its name.
-- Parameter: bin INTEGER = 100, inner steps in a point; a segment of an island is never cut, so a point is at least that long.
-- Columns: tier, corpus, step (the last one of the point, of any island), tokens, loss (mean over the tokens of all islands, nats per token; null:
-- none was measured).
-- For a branch, an island's steps before it are those of the run that it goes on from.
SELECT
    r.tier,
    k.corpus,
    max(r.last_step) AS step,
    sum(r.tokens)::BIGINT AS tokens,
    sum(r.loss_sum) / nullif(sum(r.loss_tokens), 0) AS loss
FROM consumption_rounds AS r
INNER JOIN island_segments($run) AS a USING (run, checkpoint)
INNER JOIN shard_kinds AS k USING (shard)
GROUP BY r.tier, k.corpus, (a.step - 1) // greatest($bin, 1)
ORDER BY array_position(['S', 'A', 'B', 'C'], r.tier), k.corpus, step;
