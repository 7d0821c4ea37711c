"""The operation kinds that core ships, one package each."""
