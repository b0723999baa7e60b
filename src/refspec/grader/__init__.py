"""The exercises and their judge.

exercise.py says what an exercise is, workspace.py where the learner's files are, judge.py how they are judged and what
that proves. Nothing is imported here: the process that runs learners' code imports this package, and must not hold
what judges it.
"""
