"""One folder per operation: the slow truth, and backends compared with it."""
