"""The ground of Atoll: the store, the table schemas, the tables, the SQL over them, the shard format. Imports nothing of ours."""
