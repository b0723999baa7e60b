"""Checks of notes on three pull requests, and of what was read in the code."""
