-- Which mixes was every island of a run asked to train on?
-- Parameter: run, its name.
-- Columns: island, round (the first that uses it), strategy, weight_s, weight_a, weight_b, weight_c. Of several decisions on a round the last counts.
SELECT island, round, strategy, weight_s, weight_a, weight_b, weight_c
FROM mixtures
WHERE run = $run
QUALIFY row_number() OVER (PARTITION BY island, round ORDER BY written_at DESC) = 1
ORDER BY island, round;
