"""The shared-memory backend for groups whose members are on one node.

In this package a piece is a part of a flat tensor that is sent as one message. It is not a piece of a sharded dim.
"""
