"""Pools: engines' classes over stacked planes."""
