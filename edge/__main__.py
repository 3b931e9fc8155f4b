"""`python -m edge` is the command `edgellm`."""

import sys

from edge.cli import main

if __name__ == "__main__":
    sys.exit(main())
