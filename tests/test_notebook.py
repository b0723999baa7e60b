"""Notebooks run from top to bottom, say the same every time, and become pages.

Case SITE-03 (a notebook saved with a private kernel name does not run elsewhere) is asked of every notebook.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from built_site import built_site

from refspec.chapters import REPOSITORY, CourseError, find_notebooks
from refspec.course import notebook
from refspec.course.notebook import RenderedNotebook, render_notebook

NOTEBOOKS = find_notebooks()
PNG = b"\x89PNG\r\n\x1a\n"
DOT = (
    "from base64 import b64decode\nfrom IPython.display import Image, display\n"
    'dot = Image(b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E'
    'rkJggg=="))\n'
)

_rendered: dict[Path, RenderedNotebook] = {}


@pytest.fixture(params=NOTEBOOKS, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def page(file: Path) -> RenderedNotebook:
    """Executed once for all tests."""
    if file not in _rendered:
        _rendered[file] = render_notebook(file)
    return _rendered[file]


def executed(page: RenderedNotebook) -> Any:
    (content,) = (content for name, content in page.files.items() if name.endswith(".ipynb"))
    return json.loads(content)


def outputs(page: RenderedNotebook) -> list[Any]:
    return [output for cell in executed(page)["cells"] for output in cell.get("outputs", [])]


def written(folder: Path, *cells: str, title: str = "# Title") -> Path:
    file = folder / "01_made.py"
    file.write_text(f"# %% [markdown]\n# {title}\n\n" + "\n\n".join(f"# %%\n{cell}" for cell in cells) + "\n")
    return file


# --- every notebook -----------------------------------------------------------------------------------------------


def test_SITE_03_the_kernel_is_python3(file: Path, page: RenderedNotebook) -> None:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert jupytext.read(file).metadata["kernelspec"] == kernel
    assert executed(page)["metadata"] == {"kernelspec": kernel, "language_info": {"name": "python"}}


def test_SITE_03_runs_from_top_to_bottom(file: Path, page: RenderedNotebook) -> None:
    sources = [cell.source for cell in jupytext.read(file).cells if cell.cell_type == "code"]
    cells = [cell for cell in executed(page)["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in cells] == sources
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(sources) + 1))
    assert {output["output_type"] for output in outputs(page)} <= {"stream", "display_data"}
    assert {output["name"] for output in outputs(page) if output["output_type"] == "stream"} == {"stdout"}


def test_SITE_03_a_second_execution_gives_the_same(page: RenderedNotebook) -> None:
    """The site's own: it offers the same notebook and the same pictures, byte for byte."""
    assert page.files
    for name, content in page.files.items():
        assert (built_site() / "notebooks" / name).read_bytes() == content


def test_the_executed_notebook_is_valid(page: RenderedNotebook) -> None:
    nbformat.validate(nbformat.from_dict(executed(page)))


def test_every_picture_has_alt_text(page: RenderedNotebook) -> None:
    pictures = re.findall(r"!\[(.*?)\]\((.*?)\)", page.markdown)
    assert [name for _, name in pictures] == [name for name in page.files if name.endswith(".png")]
    assert len(pictures) >= 3
    for alt, name in pictures:
        assert len(alt) > 40, name
        assert page.files[name].startswith(PNG)
    drawn = [output for output in outputs(page) if "image/png" in output.get("data", {})]
    assert [output["metadata"]["image/png"]["alt"] for output in drawn] == [alt for alt, _ in pictures]


def test_no_output_names_a_place_on_this_machine(page: RenderedNotebook) -> None:
    texts = [output["text"] if "text" in output else output["data"]["text/plain"] for output in outputs(page)]
    assert texts
    for place in (REPOSITORY, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir()), Path.cwd()):
        assert str(place) not in json.dumps(texts)
    assert not re.search(r"0x[0-9a-f]{6,}", json.dumps(texts))


def test_the_page(file: Path, page: RenderedNotebook) -> None:
    download = f"{file.stem}/{file.stem}.ipynb"
    head = page.markdown.split("\n\n")[:2]
    assert head[0] == f"# {page.title}"
    assert f"rendered from an execution of `notebooks/{file.name}`" in head[1]
    assert f"]({download}){{ download }}" in head[1]
    assert download in page.files
    for cell in executed(page)["cells"]:
        source = "".join(cell["source"]).partition("# alt:")[0].strip()
        assert (
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else source.partition("\n")[2]
        ) in page.markdown
    for output in outputs(page):
        if "text" in output:
            assert f"```text\n{''.join(output['text']).rstrip()}\n```" in page.markdown
    assert "# alt:" not in page.markdown


# --- how it is done -----------------------------------------------------------------------------------------------


def test_runs_in_this_python_whatever_is_installed_or_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel of the name python3, the user's start-up files, a backend without pictures: none has a say."""
    kernel = tmp_path / "jupyter/kernels/python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text('{"argv": ["false"], "display_name": "Python 3", "language": "python"}')
    startup = tmp_path / "ipython/profile_default/startup"
    startup.mkdir(parents=True)
    (startup / "noise.py").write_text("print('noise')\nanswer = 1")
    for name, value in {"JUPYTER_PATH": "jupyter", "IPYTHONDIR": "ipython"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cells = [
        "import os, sys\nimport torch",
        "print(sys.executable, os.getcwd(), 'answer' in dir())",
        "print(os.environ.get('TRITON_INTERPRET', '0') == '1' or torch.cuda.is_available())",
        "print(os.environ['MPLBACKEND'])",
        "print('```')",
        "len('four')",
    ]
    page = render_notebook(written(tmp_path, *cells))
    assert f"```text\n{sys.executable} {REPOSITORY} False\n```" in page.markdown
    assert "```text\nTrue\n```" in page.markdown
    assert "```text\nmodule://matplotlib_inline.backend_inline\n```" in page.markdown
    assert "````text\n```\n````" in page.markdown
    assert "```text\n4\n```" in page.markdown
    assert os.environ["MPLBACKEND"] == "agg"


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        ("x = 1\n1 / 0", "the cell that begins with `x = 1` failed: ZeroDivisionError: division by zero"),
        ("assert not 'a\\nb'", "the cell that begins with `assert not 'a\\nb'` failed: AssertionError"),
        ("raise OSError('a\\nb')", "the cell that begins with `raise OSError('a\\nb')` failed: OSError: a b"),
        ("import os\nos._exit(1)", "the cell that begins with `import os` ended its Python process"),
        (DOT + "display(dot)", "the cell that begins with `from base64 import b64decode` draws a picture: end it with"),
        (DOT + "display(dot, dot)\n# alt: Dots.", "draws 2 pictures: give each a cell of its own"),
    ],
    ids=["error", "no message", "long message", "exit", "no alt text", "two pictures"],
)
def test_what_is_at_fault_is_said_in_one_line(tmp_path: Path, cell: str, complaint: str) -> None:
    file = written(tmp_path, cell)
    with pytest.raises(CourseError) as caught:
        render_notebook(file)
    assert str(caught.value).startswith(f"{file}: the cell that begins with ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cell_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "CELL_TIMEOUT", 1)
    with pytest.raises(CourseError, match="`while True: pass` did not end within 1 s"):
        render_notebook(written(tmp_path, "while True: pass"))


@pytest.mark.parametrize("title", ["no heading", "## a lower heading"])
def test_a_notebook_without_a_title(tmp_path: Path, title: str) -> None:
    with pytest.raises(CourseError, match="its first cell must be text that begins with a heading"):
        render_notebook(written(tmp_path, "1 / 0", title=title))


def test_alt_text_of_several_lines_ends_the_cell(tmp_path: Path) -> None:
    page = render_notebook(written(tmp_path, DOT + "display(dot)\n# alt: A dot,\n#   alone."))
    assert "![A dot, alone.](01_made/fig_1.png)" in page.markdown
    assert "display(dot)\n```\n" in page.markdown
    assert page.files["01_made/fig_1.png"].startswith(PNG)


def test_notebooks_are_found_by_their_numbers(tmp_path: Path) -> None:
    assert find_notebooks(tmp_path) == []
    for name in ("README.md", "draft.py", "02_b.py", "01_a.py"):
        (tmp_path / name).touch()
    assert [file.name for file in find_notebooks(tmp_path)] == ["01_a.py", "02_b.py"]
