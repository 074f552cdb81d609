"""Who holds what of the model while it trains."""
