"""How fast steps are and what memory they take: against plain loops, other methods, and one process."""
