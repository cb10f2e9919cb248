"""The simulation: when each action of a schedule starts and ends, given the cost of each."""
