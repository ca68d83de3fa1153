"""`python -m distdl.agent`, a name that requests of jobs carry: see distdl.agent.agent."""

import sys

if __name__ == "__main__":
    from distdl.agent.agent import main

    sys.exit(main())
