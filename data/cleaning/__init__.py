"""Steps that clean text."""
