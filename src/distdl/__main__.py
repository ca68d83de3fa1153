"""`python -m distdl`: see distdl.cli.main."""

if __name__ == "__main__":  # before the slow imports, so that Ctrl-C is handled during them
    from distdl.cli.entry import command

    command()
