"""`python -m revela_hub`, which is also what `accelerate launch -m revela_hub` runs in every process."""

import sys

from revela_hub.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
