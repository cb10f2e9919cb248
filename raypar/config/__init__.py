"""A run as plain data: its fields, recipes, TOML files, and everything that can be wrong with it."""
