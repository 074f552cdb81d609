"""What a command says while it works: lines, and one status line of what it is doing now."""
