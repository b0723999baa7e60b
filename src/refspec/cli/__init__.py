"""The commands: parse, call, render. Nothing here imports torch before a command needs it."""
