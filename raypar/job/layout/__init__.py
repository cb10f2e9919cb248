"""The layouts of a run: those that it may shrink to, another one that it goes on in, and experts in another order."""
