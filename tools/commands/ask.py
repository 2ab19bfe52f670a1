"""Commands that ask: SQL, named questions, a DuckDB file."""
