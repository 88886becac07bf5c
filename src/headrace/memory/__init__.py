"""Memory: alignment arithmetic, buffers and the bounded pool of page-locked blocks."""
