"""The shared-memory backend for groups whose members are on one node.

In this package a segment is a part of a flat tensor that is sent as one message.
"""
