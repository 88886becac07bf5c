"""Copies of checkpoints as safetensors: where from, where to, and a part at a time between."""
