"""Pools: SGLang's classes over stacked planes."""
