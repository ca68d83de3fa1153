"""`python -m distdl.agent`, a name that requests of jobs carry: see distdl.worker.agent."""

import sys

if __name__ == "__main__":
    from distdl.worker.agent import main

    sys.exit(main())
