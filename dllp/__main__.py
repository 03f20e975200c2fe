"""`python -m dllp` is the command line."""

import sys

from dllp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
