"""`refspec`, and `python -m refspec`.

Loading the commands takes tenths of a second, and Ctrl-C may come in them. So nothing of that is imported up here, and
what imports it is ready for Ctrl-C.
"""

import sys


def main(prog_name: str | None = None) -> None:
    """Run the command line in sys.argv, which usage lines call `prog_name` (None: sys.argv[0]). Ends in SystemExit."""
    try:
        from refspec.cli.main import app

        app(prog_name=prog_name)
    except KeyboardInterrupt:
        print("refspec: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main("python -m refspec")
