"""`python -m megaresume.cli`: the command where its entry point is not on the path."""

import sys

from megaresume.cli.main import main

sys.exit(main())
