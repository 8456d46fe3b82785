"""`python -m viviane` is the command `viviane`."""

from viviane.cli.main import main

if __name__ == "__main__":
    main()
