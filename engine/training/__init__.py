"""Training: the session, the loop over phases and steps, evaluation, and what a run writes."""
