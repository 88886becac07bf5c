"""The benchmark of writing: ``python -m benchmarks.save``."""
