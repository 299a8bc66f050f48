"""Name the packages that this Python lacks, before anything imports them (``python needs.py MODULE ...``)."""

import importlib.util
import os
import sys
from importlib.metadata import entry_points

#: Names of packages by those of their modules, where they differ.
PACKAGES = {"zmq": "pyzmq", "pytest_timeout": "pytest-timeout"}

wanted = set(sys.argv[1:])
sys.path.insert(0, os.getcwd())  # where `python -m pytest` looks, too
if entry_points(group="memckpt.commands"):
    wanted.discard("setuptools")  # tests make entry points with it where memckpt is not installed

lacking = [PACKAGES.get(name, name) for name in sys.argv[1:] if name in wanted and not importlib.util.find_spec(name)]
if lacking:
    sys.exit(f"{sys.executable} lacks {', '.join(lacking)}. Run: {sys.executable} -m pip install {' '.join(lacking)}")
