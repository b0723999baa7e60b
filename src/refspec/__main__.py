"""`python -m refspec` is `refspec`."""

from refspec.cli.main import app

app(prog_name="python -m refspec")
