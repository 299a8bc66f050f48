"""Name the packages that this Python lacks, before anything imports them (``python needs.py MODULE ...``)."""

import importlib.util
import sys

#: Names of packages by those of their modules, where they differ.
PACKAGES = {"zmq": "pyzmq", "pytest_timeout": "pytest-timeout"}

lacking = [PACKAGES.get(name, name) for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if lacking:
    sys.exit(f"{sys.executable} lacks {', '.join(lacking)}. Run: {sys.executable} -m pip install {' '.join(lacking)}")
