"""`profile` and `tune`: what a step spends, and what each measure is worth here, by trials."""
