"""Commands that keep the tables in shape: compact, vacuum, history."""
