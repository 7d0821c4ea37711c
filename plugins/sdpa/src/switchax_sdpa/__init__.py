"""The "sdpa" and "cudnn" operations: `jax.nn.dot_product_attention`."""
