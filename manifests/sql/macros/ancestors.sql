-- Which island checkpoints made a checkpoint? `SELECT * FROM ancestors(from_hex('…'))`
-- Parameter: target, the id of an island's or a global checkpoint (BLOB).
-- Columns: checkpoint, run, island, round, step; the target itself is among them where it is an island's. See ancestors_of.sql.
CREATE MACRO ancestors(target) AS TABLE
SELECT checkpoint, run, island, round, step FROM ancestors_of([target]);
