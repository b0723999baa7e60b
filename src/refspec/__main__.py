"""`refspec`, and `python -m refspec`.

Loading the commands takes tenths of a second, and Ctrl-C may come in them. So nothing of that is imported up here, and
what imports it is ready for Ctrl-C.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` looks into the current folder first, which may hold a learner's files: a psutil.py there is none of
    # ours. What Python needs to get here it has looked for there already; `python -P -m refspec` or `refspec` do not.
    del sys.path[0]

# What torch's threads do while they wait for one another. By default they spin, for a little faster answer; where other
# programs are at work too, they then spin while the thread that they wait for has no core, and all of it takes several
# times as long. Read when torch is loaded.
WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def main(prog_name: str | None = None) -> None:
    """Run the command line in sys.argv, which usage lines call `prog_name` (None: sys.argv[0]). Ends in SystemExit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed (`<&-`): else the next file opened would take its place
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    for name, value in WAIT.items():
        os.environ.setdefault(name, value)
    try:
        from refspec.cli.main import app

        app(prog_name=prog_name)
    except KeyboardInterrupt:
        print("refspec: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main("python -m refspec")
