"""Random draws keyed by sample, and the modules that use them."""
