"""The documents as a site: `make docs`. No part of distdl; docs/ stays readable without it."""
