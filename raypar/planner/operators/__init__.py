"""The strategies of a user's own modules over tensor ranks, and the search for the fastest ones (intra-operator)."""
