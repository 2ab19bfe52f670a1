"""Statements that would write, read another file of the machine, reach the network, or load an extension."""

from __future__ import annotations

# `{file}` is a data file of the store, `{secret}` a file beside it, `{new}` a file that isn't there.
READ_FILES = [
    "FROM '{secret}'",
    "SELECT * FROM read_blob('{secret}')",
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_json('{secret}')",
    "SELECT * FROM read_parquet('{secret}')",
    "SELECT * FROM parquet_metadata('{secret}')",
    "SELECT * FROM sniff_csv('{secret}')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM query_table('{secret}')",
    "SELECT * FROM query('FROM read_text(''{secret}'')')",
    "EXPLAIN ANALYZE SELECT * FROM read_text('{secret}')",
    "DESCRIBE FROM '{secret}'",
    "SELECT getenv('HOME')",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM 'https://example.com/x.parquet'",
    "SELECT * FROM 's3://bucket/x.parquet'",
]
LOAD = [
    "LOAD httpfs",
    "INSTALL httpfs",
    "LOAD '{secret}'",
    "SELECT * FROM sqlite_scan('{secret}', 't')",
    "SELECT * FROM sql_auto_complete('sel')",
    "CALL dbgen(sf = 0.01)",
]
CONFIGURE = [
    "SET enable_external_access = true",
    "RESET enable_external_access",
    "SET GLOBAL lock_configuration = false",
    "SET allowed_paths = ['{secret}']",
    "PRAGMA enable_external_access = true",
    "CALL enable_logging('QueryLog', storage = 'file', storage_config = {{'path': '{new}'}})",
]
WRITE_ELSEWHERE = [
    "COPY (SELECT 1) TO '{new}'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{new}'",
    "WITH t AS (COPY (SELECT 1) TO '{new}') SELECT * FROM t",
    "EXPORT DATABASE '{new}'",
    "IMPORT DATABASE '{new}'",
    "ATTACH '{new}'",
    "CREATE TABLE t (a VARCHAR); COPY t FROM '{secret}'",
    "PREPARE p AS COPY (SELECT 1) TO '{new}'",
    "CREATE PERSISTENT SECRET s (TYPE s3)",
]
WRITE_OVER = [
    "COPY (SELECT 1) TO '{file}'",
    "COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)",
    "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)",
    "EXPLAIN /* SELECT */ ANALYZE -- SELECT\n COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)",
    "WITH t AS (COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)) SELECT * FROM t",
    "EXPLAIN ANALYZE WITH t AS (COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)) SELECT * FROM t",
    "SELECT * FROM query('COPY (SELECT 1) TO ''{file}''')",
    "SELECT * FROM query('WITH t AS (COPY (SELECT 1) TO ''{file}'' (USE_TMP_FILE false)) SELECT * FROM t')",
    "PREPARE p AS COPY (SELECT 1) TO '{file}' (USE_TMP_FILE false)",
]
IN_MEMORY = [
    "CREATE MACRO m() AS 1",
    "CREATE TABLE t AS SELECT 1",
    "EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1",
    "WITH t AS (INSERT INTO events SELECT * FROM events RETURNING *) SELECT * FROM t",
    "ATTACH ':memory:' AS other",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "CALL pragma_version()",
    "PRAGMA database_list",
    "USE memory",
    "DROP VIEW events",
    "UPDATE events SET run = 'x'",
    "DELETE FROM events",
    "BEGIN",
    "VACUUM",
    "SELECT 1; DROP VIEW events",
    "",
]
