"""``python -m raypar``: the command line, for a Python whose scripts are not on the path."""

import sys

from raypar.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
