"""raypar beside what a user would pick instead: ``make bench``, or ``python -m tests.bench --help``."""
