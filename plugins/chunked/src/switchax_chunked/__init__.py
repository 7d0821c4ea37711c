"""The "chunked" operation: attention in plain JAX, in memory linear in the lengths."""
