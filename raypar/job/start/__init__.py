"""What is done with a run before its first step: checks, folders, plans of the actors, their start."""
