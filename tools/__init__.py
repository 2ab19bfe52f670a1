"""What people run: the command line, the demo and its text, the report page, the benchmarks."""
