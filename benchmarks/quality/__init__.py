"""What is learnt: equal losses under every strategy, accuracy after compression, the use of texts."""
