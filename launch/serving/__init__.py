"""A finished model behind HTTP, for trying it out."""
