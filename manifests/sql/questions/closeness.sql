-- How close were the islands' outer gradients, merge by merge?
-- Parameter: run VARCHAR, its name.
-- Parameter: island INTEGER = NULL, only the pairs with this island.
-- Columns: merge (number in the run), pair (its two islands), island, other, fragment (that was merged), cosine (of the two outer gradients, −1 to 1).
-- Also of islands that the gate then kept out of the merge. Islands whose data teach the same have cosines near 1; around 0 each teaches something of its own,
-- and below 0 one takes back what the other does.
WITH told AS (
    SELECT fragment, from_json(detail, '{"merge": "INTEGER", "islands": ["INTEGER"], "cosines": [["DOUBLE"]]}') AS said
    FROM events
    WHERE kind = 'merge' AND run = $run
),

-- Row i of the cosines has island i with every island after it.
first AS (
    SELECT fragment, said.merge, said.islands, unnest(range(1, len(said.islands) + 1)) AS i, said.cosines
    FROM told
),

pairs AS (
    SELECT fragment, merge, islands[i] AS island, islands, cosines[i] AS along, i, unnest(range(1, len(islands) - i + 1)) AS j
    FROM first
)

SELECT
    merge,
    format('{} and {}', island, islands[i + j]) AS pair,
    island,
    islands[i + j] AS other,
    fragment,
    along[j] AS cosine
FROM pairs
WHERE $island IS NULL OR island = $island OR islands[i + j] = $island
ORDER BY merge, island, other;
