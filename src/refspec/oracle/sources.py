"""SGLang's kernel files, taken out of its wheels without importing the package.

SGLang as a package brings hundreds of dependencies. Its kernel files need only a handful of small things from it,
which are stood in for while such a file is loaded; nothing stays behind in sys.modules.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from refspec.kernels.backend import tl, triton


class Sources:
    """The unpacked wheels. folders: the folder `sglang` of each version at hand, by version."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = dict(folders)
        self._loaded: dict[tuple[str, ...], Any] = {}

    def module(self, path: str, version: str = "0.5.23") -> ModuleType:
        """The file `path` (as in "kernels/ops/speculative/spec_tree.py"), loaded beside stand-ins.

        Raises ValueError if that version is not at hand, FileNotFoundError if it has no such file.
        """
        key = ("module", version, path)
        if key not in self._loaded:
            name = "sglang_" + Path(path).stem
            spec = importlib.util.spec_from_file_location(name, self._file(path, version))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            with patch.dict(sys.modules, {**_stand_ins(), name: module}):
                spec.loader.exec_module(module)
            self._loaded[key] = module
        return self._loaded[key]

    def jit_functions(self, path: str, version: str) -> SimpleNamespace:
        """Only the `@triton.jit` functions of a file that cannot be loaded whole. Raises as `module` does."""
        key = ("jit_functions", version, path)
        if key not in self._loaded:
            file = self._file(path, version)
            tree = ast.parse(file.read_text(encoding="utf-8"))
            kernels = [
                node
                for node in tree.body
                if isinstance(node, ast.FunctionDef)
                and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
            ]
            namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "sglang_" + file.stem}
            # Triton reads a kernel's source through inspect, which goes by file name and line: keep both.
            exec(compile(ast.Module([*kernels], []), str(file), "exec"), namespace)
            self._loaded[key] = SimpleNamespace(**{node.name: namespace[node.name] for node in kernels})
        return self._loaded[key]

    def _file(self, path: str, version: str) -> Path:
        if version not in self.folders:
            raise ValueError(f"the wheel of SGLang {version} is not ready: refspec oracle fetch")
        return self.folders[version] / path


def _stand_ins() -> dict[str, ModuleType]:
    """What the kernel files import from the rest of SGLang. is_xpu is true: that is the platform without CUDA code of
    its own, where SGLang launches these Triton kernels.
    """
    utils = ModuleType("sglang.srt.utils")
    for platform in ("cpu", "cuda", "hip", "musa", "npu", "xpu"):
        setattr(utils, f"is_{platform}", lambda answer=platform == "xpu": answer)
    utils.next_power_of_2 = triton.next_power_of_2  # type: ignore[attr-defined]
    platforms = ModuleType("sglang.srt.platforms")
    platforms.current_platform = SimpleNamespace(is_out_of_tree=lambda: False)  # type: ignore[attr-defined]
    interface = ModuleType("sglang.srt.platforms.interface")
    interface.reject_out_of_tree_path = lambda *_, **__: None  # type: ignore[attr-defined]
    packages = {name: ModuleType(name) for name in ("sglang", "sglang.srt")}
    return {**packages, utils.__name__: utils, platforms.__name__: platforms, interface.__name__: interface}
