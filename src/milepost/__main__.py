"""`python -m milepost`: the command line."""

import sys

from milepost.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
