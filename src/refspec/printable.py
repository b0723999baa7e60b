"""Text of others, made harmless."""


def printable(text: str) -> str:
    """Text that does nothing to a terminal: what is no printable character becomes an escape; breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )
