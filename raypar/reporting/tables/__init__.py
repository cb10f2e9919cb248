"""Tables of a job for a REPL or a notebook: actors, experts, memory and communication."""
