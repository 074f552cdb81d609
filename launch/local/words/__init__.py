"""What the words of a command line mean: those of other tools, and lists for a sweep."""
