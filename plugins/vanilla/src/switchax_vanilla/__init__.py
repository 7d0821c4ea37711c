"""The "vanilla" operation: attention in plain jnp, every feature, every platform."""
