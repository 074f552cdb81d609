"""(recipe, facts, hardware) -> plan."""
