-- Which is the last global checkpoint of a run?
-- Parameter: run, its name.
-- Columns: checkpoint, round, step, tokens, tokens_s, tokens_a, tokens_b, tokens_c, holdout_loss, clock, written_at.
SELECT checkpoint, round, step, tokens, tokens_s, tokens_a, tokens_b, tokens_c, holdout_loss, clock, written_at
FROM checkpoints
WHERE run = $run AND island = -1
ORDER BY written_at DESC
LIMIT 1;
