"""Numbers, signs, colours and lines of text: what every panel draws with."""
