"""The words of a command line: flags, help, what was meant."""
