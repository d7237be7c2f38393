"""Pure state machines of server, worker and coordinator, and the messages between them.

An event goes in, actions come out. Nothing here holds an array, reads a clock or moves a byte.
"""
