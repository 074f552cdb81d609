"""From the prepared data to the micro-batches of a step."""
