"""The planner: (recipe, facts, model size, hardware, options) -> plan."""
