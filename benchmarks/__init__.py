"""Benchmarks of headrace beside its peers: ``python -m benchmarks.load``."""
