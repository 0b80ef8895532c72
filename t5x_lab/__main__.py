"""`python -m t5x_lab`, the same as the command `t5x_lab`."""

import sys

from t5x_lab.cli.main import main

sys.exit(main())
