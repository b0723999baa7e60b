"""A notebook becomes a page: executed from top to bottom, each output below the code that made it.

Notebooks are kept as text (jupytext's percent format). Nothing that they print is stored in the repository, so a page
cannot show what the code no longer does.

A cell that draws says in its last lines what the picture shows, for readers who do not see it:

    # alt: A tree of 16 nodes, and beside it
    # its mask.

The page has these words as the picture's alt text, and not a second time as code.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import torch
from jinja2 import DictLoader
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import MarkdownExporter
from nbformat import NotebookNode

from refspec.chapters import REPOSITORY, CourseError

CELL_TIMEOUT = 300  # seconds; far more than any cell takes on two cores
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

ALT_TEXT = re.compile(r"(?:\A|\n)# alt: (.+(?:\n#.*)*)\s*\Z")

# nbconvert's own template indents outputs, and calls every picture "png".
TEMPLATE = """\
{%- extends 'markdown/index.md.j2' -%}
{%- block input %}
{{ cell.source | fenced('python') }}
{% endblock input -%}
{%- block stream %}
{{ output.text | fenced('text') }}
{% endblock stream -%}
{%- block data_text %}
{{ output.data['text/plain'] | fenced('text') }}
{% endblock data_text -%}
{%- block data_png %}
![{{ output.metadata['image/png'].alt }}]({{ output.metadata.file }})
{% endblock data_png -%}
"""


@dataclass(frozen=True)
class RenderedNotebook:
    """An executed notebook as a page and the files that it shows.

    markdown: with its title as the first heading. files: contents by name. Names, here and in the links of the
    markdown, are relative to the folder that holds the page's source: notebooks/01_one_round.md shows
    01_one_round/fig_1.png. Where the page becomes notebooks/01_one_round/index.html, the files stand beside it.

    The link for the download has an attribute, in the syntax of Python-Markdown's attr_list.
    """

    title: str
    markdown: str
    files: dict[str, bytes]


def render_notebook(file: Path) -> RenderedNotebook:
    """Execute a notebook and make a page of it. On the same machine the same source gives the same bytes.

    Runs in a kernel of its own, with this Python, in the repository's folder. Raises CourseError with one line that
    names the notebook and, where one is at fault, the cell by its first line: a cell that fails or does not end, a
    picture without alt text, more than one picture in a cell, a notebook without a title.
    """
    notebook = jupytext.read(file, fmt="py:percent")
    # Ids are random, and what else jupytext knows of the text file means nothing in the executed one.
    notebook.metadata.clear()
    notebook.metadata.update({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number}"
    title = _title(notebook, file)
    _execute(notebook, file)
    files = {f"{file.stem}/{name}": data for name, data in _name_pictures(notebook, file)}
    download = f"{file.stem}/{file.stem}.ipynb"
    files[download] = (nbformat.writes(notebook) + "\n").encode()  # type: ignore[no-untyped-call]
    return RenderedNotebook(title, _markdown(notebook, file, download), files)


class _ThisPython(AsyncKernelManager):
    """Starts the interpreter that runs this, whatever kernels are installed under the name python3, or none."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=KERNEL["display_name"], language=KERNEL["language"])


def _execute(notebook: NotebookNode, file: Path) -> None:
    """Run all cells; their outputs are in the notebook afterwards, nothing that tells of the time among them."""
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            km=_ThisPython(transport="ipc", connection_file=f"{folder}/kernel.json"),  # sockets, and no open ports
            timeout=CELL_TIMEOUT,
            record_timing=False,
            coalesce_streams=True,  # how a cell's output is cut into messages is a matter of timing
        )
        environment = os.environ | {
            "IPYTHONDIR": folder,  # no start-up files of the user's
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "PYTHONHASHSEED": "0",
        }
        if not torch.cuda.is_available():
            environment["TRITON_INTERPRET"] = "1"
        with client.setup_kernel(cleanup_kc=True, env=environment, cwd=str(REPOSITORY)):
            for index, cell in enumerate(notebook.cells):
                try:
                    client.execute_cell(cell, index)
                except CellExecutionError as error:
                    raise _fault(file, cell, f"failed: {error.ename}: {error.evalue}".rstrip(": ")) from None
                except CellTimeoutError:
                    raise _fault(file, cell, f"did not end within {CELL_TIMEOUT} s") from None
                except DeadKernelError:
                    raise _fault(file, cell, "ended its Python process") from None


def _name_pictures(notebook: NotebookNode, file: Path) -> Iterator[tuple[str, bytes]]:
    """Give every picture its alt text, in the output's metadata, where Jupyter looks for it. Yields names and data."""
    number = 0
    for cell in notebook.cells:
        pictures = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
        alt = ALT_TEXT.search(cell.source)
        if pictures and not alt:
            raise _fault(file, cell, "draws a picture: end it with a comment `# alt: ...` that says what it shows")
        if len(pictures) > 1:
            raise _fault(file, cell, f"draws {len(pictures)} pictures: give each a cell of its own")
        for picture in pictures:
            assert alt is not None
            number += 1
            picture.metadata["image/png"] = {"alt": " ".join(alt[1].replace("\n#", " ").split())}
            yield f"fig_{number}.png", b64decode(picture.data["image/png"])


def _markdown(notebook: NotebookNode, file: Path, download: str) -> str:
    """The page; below its title stands where it comes from."""
    page = copy.deepcopy(notebook)
    number = 0
    for cell in page.cells:
        cell.source = ALT_TEXT.sub("", cell.source)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                number += 1
                output.metadata["file"] = f"{file.stem}/fig_{number}.png"
    source = f"notebooks/{file.name}"
    heading, _, rest = page.cells[0].source.partition("\n")
    page.cells[0].source = (
        f"{heading}\n\nThis page was rendered from an execution of `{source}`: every output is what the code above it "
        f"printed or drew. [Download the executed notebook]({download}){{ download }}\n{rest}"
    )
    exporter = MarkdownExporter(  # type: ignore[no-untyped-call]
        extra_loaders=[DictLoader({"page.md.j2": TEMPLATE})],
        template_file="page.md.j2",
        filters={"fenced": _fenced},
    )
    markdown, _ = exporter.from_notebook_node(page)
    return str(markdown).strip() + "\n"


def _fenced(text: str, language: str) -> str:
    """Between fences that are longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _title(notebook: NotebookNode, file: Path) -> str:
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        raise CourseError(f"{file}: its first cell must be text that begins with a heading, # ...")
    return str(first.source.splitlines()[0].removeprefix("# ").strip())


def _fault(file: Path, cell: Any, what: str) -> CourseError:
    """In one line."""
    first_line = (cell.source.splitlines() or [""])[0]
    return CourseError(" ".join(f"{file}: the cell that begins with `{first_line}` {what}".split()))
