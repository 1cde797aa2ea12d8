"""Matrix products modulo 2^64: several ways to the same bits, and which of them a machine is fastest with."""
