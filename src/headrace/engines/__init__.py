"""Engines move bytes: all of them, or they raise."""
