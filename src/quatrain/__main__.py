"""`python -m quatrain` is the command `quatrain`."""

from quatrain.cli.main import main

if __name__ == "__main__":
    main()
