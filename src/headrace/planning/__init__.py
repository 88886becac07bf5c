"""Deciding, without touching the machine: facts in, plan out."""
