"""One file for each operation that has more than one opinion; each calls its description OPERATION."""
