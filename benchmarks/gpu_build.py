"""Build the package into a folder and check that its C++ operators serve the device."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = {"cuda": "libpoplar_ops_cuda.so", "cpu": "libpoplar_ops.so"}
_ASK = "from poplar import ops; print(ops.describe())"


def main() -> None:
    """Install with pip without a network, then ask the installed package for its operators."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="folder of the installation")
    parser.add_argument("--provider", choices=LIBRARY, required=True, help="device to check")
    parser.add_argument("settings", nargs="*", help="of pip, after --")
    options = parser.parse_args()
    shutil.rmtree(options.target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", options.target]
    root = Path(__file__).resolve().parents[1]
    subprocess.run([*command, *options.settings, root], check=True)
    environment = {**os.environ, "PYTHONPATH": str(options.target)}
    asked = [sys.executable, "-c", _ASK]
    found = subprocess.check_output(asked, env=environment, cwd=options.target, text=True).strip()
    if LIBRARY[options.provider] not in found:
        sys.exit(f"the C++ operators for {options.provider} were not built: {found}")
    print(f"built: {found}")


if __name__ == "__main__":
    main()
