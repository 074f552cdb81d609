"""The shapes of tables: which rows and columns a file of text holds."""
