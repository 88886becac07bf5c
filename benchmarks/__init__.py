"""Benchmarks of headrace beside its peers: ``benchmarks.load`` and ``benchmarks.save``."""
