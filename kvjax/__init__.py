"""KV-cache memory pools for JAX, updated in place."""
