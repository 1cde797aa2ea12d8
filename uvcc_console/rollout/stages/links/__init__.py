"""How workers reach each other: the relay, ports, a broker, the worlds of one party's ranks."""
