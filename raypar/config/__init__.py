"""Configuration of a run: recipes, TOML files, and the check that finds all faults before any actor starts."""
