"""Serving a request trace through a pool, and checking every row of it."""
