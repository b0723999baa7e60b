"""`refspec site`: the course as a web site."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from refspec.cli.command_line import CommandLine, shows_progress
from refspec.cli.wording import plural

site_app = typer.Typer(cls=CommandLine, help="Build the course's site, or serve it.")


@site_app.command()
def build(
    out: Annotated[Path | None, typer.Option(help="Where to.", show_default="site/ in the repository")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Build the site into a folder, checking every link in it.

    A folder that holds something else than a site built before is left alone.
    """
    from refspec.course.site import build_site

    with Console(stderr=True).status("building the site") if shows_progress(as_json) else nullcontext():
        site = build_site(out)
    if as_json:
        typer.echo(json.dumps({"out": str(site.out), "pages": site.pages, "seconds": round(site.seconds, 2)}))
    else:
        typer.echo(f"{plural(site.pages, 'page')} in {site.out}, built in {site.seconds:.1f} s")


@site_app.command()
def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="To listen on.")] = 8000,
    host: Annotated[str, typer.Option(help="Whose port; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
) -> None:
    """Build the site and serve it until Ctrl-C. What changes is built anew, and open pages follow."""
    from refspec.course.site import address, require_port, serve_site

    require_port(host, port)
    typer.echo(f"building the site; then it is at {address(host, port)} (Ctrl-C ends it)")
    serve_site(host, port)
