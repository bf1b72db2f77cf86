"""How fast the pools are, beside what one could use instead."""
