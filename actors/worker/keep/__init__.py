"""What a worker keeps for others: snapshots, copies of them, and state that goes to another layout."""
