"""isobatch: the recipe decides what is learnt, the plan decides how fast."""
