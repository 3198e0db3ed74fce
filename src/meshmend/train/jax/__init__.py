"""`JaxJob`: training loops of JAX."""
