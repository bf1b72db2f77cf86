"""Pools: what one is, what works on any, and the reads and writes of each kind."""
