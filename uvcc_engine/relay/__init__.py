"""The relay service: an HTTP store-and-forward that sees who writes to whom, sizes and times only.

In words: the group and number of a token, the box number of a subsession, frame headers (party, stream, sequence
number, length), the names of records (``beat/p0r0s0t0``, ``order/<random>``) and the addresses that connect. Payloads,
signs of life and orders are sealed.
"""
