"""`refspec history`, put together."""

from __future__ import annotations

from typing import Any

import typer

from refspec.cli.command_line import CommandLine, LateCommands

# In the order in which help lists them, and where each is.
COMMANDS = {
    "overview": ("refspec.cli.history.overview:overview",),
    "clone": ("refspec.cli.history.clone:clone",),
    "where": ("refspec.cli.history.where:where",),
    "doctor": ("refspec.cli.history.doctor:doctor",),
    "log": ("refspec.cli.history.log:log",),
    "dir": ("refspec.cli.history.dir:dir_",),
    "story": ("refspec.cli.history.story:story",),
    "show": ("refspec.cli.history.show:show",),
    "diff": ("refspec.cli.history.diff:diff",),
    "reland": ("refspec.cli.history.reland:reland",),
    "symbol": ("refspec.cli.history.symbol:symbol",),
    "lines": ("refspec.cli.history.lines:lines",),
    "follow": ("refspec.cli.history.follow:follow",),
    "compare": ("refspec.cli.history.compare:compare",),
    "moved": ("refspec.cli.history.moved:moved",),
    "claims": ("refspec.cli.history.claims:claims",),
    "bisect-demo": ("refspec.cli.history.bisect_demo:bisect_demo",),
    "explore": ("refspec.cli.history.explore:explore",),
}


class _HistoryCommands(CommandLine):
    """Without a command, or with options alone, `overview` is meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LateCommands(COMMANDS)  # type: ignore[assignment] # typer only reads it

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and not {"-h", "--help"} & set(args)):
            behind = next((word for word in args if word in COMMANDS), None)
            if behind:
                raise typer.BadParameter(f"options stand behind the command: refspec history {behind} {args[0]} ...")
            args = ["overview", *args]
        return super().parse_args(ctx, args)


history_app = typer.Typer(cls=_HistoryCommands, rich_markup_mode=None)


@history_app.callback()
def _group() -> None:
    """Walk the git history of SGLang's speculative decoding, in a clone of SGLang or in the embedded catalogue."""
