"""Python runs this file when it starts in a job of `poplar watch`. It loads the recorder.

A `sitecustomize` that this file hides is run too.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run(name: str, spec: Any) -> Any:
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _start() -> None:
    path = os.path.join(os.path.dirname(_FOLDER), "recorder.py")
    spec = importlib.util.spec_from_file_location("_poplar_watch_recorder", path)
    try:
        _run("_poplar_watch_recorder", spec).install(os.environ["POPLAR_WATCH"])
    except Exception as error:  # the job runs without being watched
        print(f"poplar watch: this process is not recorded: {error!r}", file=sys.stderr)


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path or ".") != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        _run("sitecustomize", spec)


if os.environ.get("POPLAR_WATCH"):
    _start()
_run_hidden()
